"""NCCL's flight record is asked for before a kill, kept with the failure, and says who had not come. The records are
made up, in the form that torch writes; on real GPUs see tests/gpu/test_flight.py."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.guard.fake import until
from tests.guard.pretended import SLEEPS, WAITS, Group

from shoal.guard.flights import ask, sentence
from shoal.guard.nodes.group import NodeGroup, Seat
from shoal.guard.progress import Progress
from shoal.guard.signs import signs_of
from shoal.guard.workers import Share, recorder_env
from shoal.journal.pulse_file import ask_file, flight_file
from shoal.parallel.flight import cut_down
from shoal.spec.run import Guard

AXES = {"0": "all", "3": "shard"}


def entry(group: str, number: int, state: str, op: str = "all_reduce", p2p: bool = False) -> dict[str, Any]:
    """As FlightRecorder::dump_json writes one, version 2.10."""
    return {
        "record_id": number,
        "pg_id": int(group),
        "process_group": [group, "undefined"],
        "thread_name": "pt_main_thread",
        "thread_id": "140245",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[1024]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1024]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": p2p,
    }


def dump(*entries: dict[str, Any], **ranks: str) -> dict[str, Any]:
    """`ranks`: members of each group, beside those of all."""
    members = {"0": "[0, 1, 2, 3]", **{name.removeprefix("g"): text for name, text in ranks.items()}}
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.7",
        "pg_config": {n: {"name": n, "desc": "undefined", "ranks": text} for n, text in members.items()},
        "pg_status": {},
        "nccl_comm_state": {},
        "entries": list(entries),
    }


def flight(*entries: dict[str, Any], **ranks: str) -> dict[str, Any]:
    return cut_down(dump(*entries, **ranks), AXES)


def test_who_has_not_begun_the_collective_is_told() -> None:
    come = flight(entry("0", 811, "completed"), entry("0", 812, "started"))
    late = flight(entry("0", 811, "completed"))
    found = sentence({0: come, 1: come, 2: late, 3: come})
    assert found == "rank 2 had not come to all_reduce 812 of group all (ranks 0 to 3)"


def test_one_that_waits_elsewhere_is_not_the_cause() -> None:
    """0 and 1 wait for 2 and 3 in the group of all; of these 3 waits for 2 in one of theirs."""
    pair = {"g3": "[2, 3]"}
    come = flight(entry("0", 50, "started"))
    waits = flight(entry("0", 49, "completed"), entry("3", 7, "started", "all_gather"), **pair)
    absent = flight(entry("0", 49, "completed"), entry("3", 6, "completed", "all_gather"), **pair)
    found = sentence({0: come, 1: come, 2: absent, 3: waits})
    assert found == "rank 2 had not come to all_reduce 50 of group all (ranks 0 to 3)"


def test_one_that_gives_no_record_is_not_said_to_be_away() -> None:
    come = flight(entry("0", 5, "started"))
    found = sentence({0: come, 1: come, 3: come})
    assert found == "rank 2 gave no record, all others had come to all_reduce 5 of group all (ranks 0 to 3)"


def test_a_device_that_has_not_got_there_and_a_network_that_is_away() -> None:
    begun, queued = flight(entry("0", 5, "started")), flight(entry("0", 5, "scheduled"))
    found = sentence({0: begun, 1: queued, 2: begun, 3: begun})
    assert found == "the device of rank 1 had not come to all_reduce 5 of group all (ranks 0 to 3)"
    assert "look at the network between them" in sentence(dict.fromkeys(range(4), begun))


def test_nobody_waits_or_the_format_is_another_one() -> None:
    done = flight(entry("0", 5, "completed"), entry("0", 6, "started", "send", p2p=True))
    assert sentence(dict.fromkeys(range(4), done)) == ""
    assert sentence({}) == ""
    assert sentence({0: {"groups": {"0": {"ranks": ["x"]}}}, 1: {"groups": 3}, 2: {}}) == ""


def test_a_rank_that_no_run_has_takes_no_memory() -> None:
    """4 billion and 2^40 fit into 64 bits; a list of all ranks up to there does not fit into a machine."""
    said = flight(entry("0", 5, "started"))
    for last, told in (((1 << 20) + 1, False), (1 << 32, False), (1 << 40, False), (1 << 20, True)):
        said["groups"]["0"]["ranks"] = [0, 1, last]
        assert ("ranks 0, 1 and 1048576" in sentence({0: said})) == told


def test_a_record_is_cut_down_to_the_newest_of_each_group() -> None:
    many = [entry("0", n, "completed") for n in range(2000)] + [entry("3", 1, "started")]
    found = flight(*many, g3="[0, 1]")
    assert [c["collective_seq_id"] for c in found["groups"]["0"]["collectives"]] == list(range(1992, 2000))
    assert found["groups"]["3"] == {
        "axis": "shard",
        "ranks": [0, 1],
        "collectives": found["groups"]["3"]["collectives"],
    }
    assert len(json.dumps(found)) < 8000


def recorded(of: dict[str, Any], then: str) -> str:
    """A rank that has such a record."""
    return f"import json\npulse.watch_flight(lambda: json.loads({json.dumps(of)!r})); {then}"


def test_before_a_kill_each_rank_is_asked_and_what_it_says_is_kept(group: Group) -> None:
    """One of them has no recorder (a CPU's)."""
    come, late = flight(entry("0", 9, "started"), g0="[0, 1]"), flight(entry("0", 8, "completed"), g0="[0, 1]")
    group.start(recorded(come, WAITS), recorded(late, SLEEPS), WAITS)
    told: list[dict] = []
    note: Callable[..., None] = lambda kind, **fields: told.append({"kind": kind, **fields})  # noqa: E731
    failure = group.looks(Progress(group.pids, group.folder, group.folder, Guard(), note), 12)
    assert failure is not None
    (hang,) = told
    assert failure.evidence.endswith("; NCCL: rank 1 had not come to all_reduce 9 of group all (ranks 0 and 1)")
    assert json.loads(Path(hang["nccl"]).read_text()) == {"0": come, "1": late}


def test_one_that_cannot_answer_is_not_waited_for_beyond_the_limit(group: Group) -> None:
    group.start(recorded({"groups": {}}, WAITS), recorded({}, SLEEPS), WAITS)
    os.kill(group.pids[1], signal.SIGSTOP)
    until(lambda: signs_of(group.pids[1]).stopped)
    assert ask_file(group.folder, 1).exists()
    assert ask([0, 1, 2, 7], group.folder, wait_s=0.3) == {0: {"groups": {}}}


def test_told_to_wait_nobody_is_asked(group: Group) -> None:
    group.start(recorded({}, WAITS), recorded({}, SLEEPS))
    told: list[dict] = []
    note: Callable[..., None] = lambda kind, **fields: told.append({"kind": kind, **fields})  # noqa: E731
    group.looks(Progress(group.pids, group.folder, group.folder, Guard(on_hang="wait"), note), 12)
    assert [(t["kind"], t["nccl"]) for t in told] == [("hang", None)]
    assert not flight_file(group.folder, 0).exists()


class Head:
    """Node 0's end of the lines to its agents, which answer at once or not at all."""

    def __init__(self, answers: dict[int, dict[str, Any]]) -> None:
        self.nodes = {number: Node(number) for number in (1, 2)}
        self._answers = answers
        self._inbox: list[tuple[Node, dict[str, Any]]] = []

    def tell(self, node: Node, kind: str, **fields: Any) -> None:
        if kind == "start":
            self._inbox.append((node, {"kind": "started", "attempt": 0, "pids": {str(node.number): 100 + node.number}}))
        elif kind == "flight" and node.number in self._answers:
            said = {"kind": "flight", "attempt": fields["attempt"], "ranks": self._answers[node.number]}
            self._inbox += [(node, said), (node, {"kind": "died", "attempt": 0, "rank": node.number, "exit_code": 1})]

    def heard(self) -> list[tuple[Node, dict[str, Any]]]:
        heard, self._inbox = self._inbox, []
        return heard


class Node:
    leaving = None

    def __init__(self, number: int) -> None:
        self.number, self.host, self.words = number, f"n{number}", f"node {number}"


def test_ranks_of_other_nodes_are_asked_by_their_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is heard meanwhile is not lost, and a node that tells of another's ranks is not believed."""
    monkeypatch.setattr("shoal.guard.nodes.group.WAIT_S", 0.3)
    head: Any = Head({1: {"1": {"groups": {}}, "2": {"groups": {"forged": {}}}}})
    seats = [Seat(None, Share(0, 0, 0, ("127.0.0.1", 1)))]
    seats += [Seat(node, Share(n, n, 1, ("127.0.0.1", 1))) for n, node in head.nodes.items()]
    group = NodeGroup(head, seats, ["true"], 3, 0, tmp_path, 1, lambda share: {}, 3)
    try:
        assert group.flights() == {1: {"groups": {}}}
        assert [death.rank for death in group.reap()] == [1]
    finally:
        group.close()


def test_the_recorder_is_on_unless_the_user_has_said_otherwise(tmp_path: Path) -> None:
    assert recorder_env({}, tmp_path) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl-timeout-rank-",
    }
    theirs = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_FR_DUMP_TEMP_FILE": "/x"}
    assert recorder_env(theirs, tmp_path) == {}
