"""The trainer of a peer, driven by a scripted node over a real socket."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.checkpoint import newest, read_full
from shoal.codec import codec
from shoal.journal.journal import records
from shoal.swarm.outer import state_files
from shoal.swarm.outer.rule import Rule
from shoal.swarm.trainer.trainer import Due
from tests.swarm.trainer_node import Message, Node, name_of, paths, record
from tests.train.tiny import make_data, make_run

RUN = {
    "name": "swarm",
    "swarm.peers": 2,
    "train.batch": 8,
    "train.steps": 200,
    "swarm.outer_lr": 1.0,
    "resources.processes": 1,
    "mesh.pp": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@contextmanager
def nodes(data: Path, folder: Path, *worlds: int, **changes: Any) -> Iterator[list[Node]]:
    """Peers whose trainers are ready."""
    with ExitStack() as stack:
        found = []
        for i, world in enumerate(worlds):
            mesh = {"resources.processes": world, "mesh.dp_shard": world, "mesh.dp_replicate": 1}
            node = Node(f"peer{i}", make_run(data, **{**RUN, **mesh, **changes}), folder, world)
            stack.callback(node.close)
            stack.enter_context(node.trainer())
            found.append(node)
        yield found


def stop(*peers: Node) -> None:
    for node in peers:
        node.say("stop")
    for node in peers:
        assert [o.status for o in node.ranks.outcomes()] == [0] * node.world


def applied(node: Node, said: Message, parts: dict[str, Message]) -> str:
    node.say("apply", record=said, parts=paths(parts))
    answer = node.hear("applied")
    assert answer["round"] == said["round"]
    assert answer["hash"] == name_of(said)
    return str(answer["digest"])


@pytest.mark.parametrize(
    "worlds",
    [pytest.param((1, 1), id="alone"), pytest.param((2, 1), id="one of two processes", marks=pytest.mark.slow)],
)
def test_two_peers_train_rounds_and_have_the_same_weights(tmp_path: Path, data: Path, worlds: tuple[int, ...]) -> None:
    with nodes(data, tmp_path, *worlds) as (a, b):
        assert a.ready["params"] == b.ready["params"]
        for node in (a, b):
            node.say("fresh", seed=5)
        assert a.hear("loaded")["digest"] == b.hear("loaded")["digest"]
        losses: list[float] = []
        parts: dict[str, Message] = {}
        said: Message = {}
        first = 0
        for round in range(1, 41):  # on a busy machine a round has few steps
            for i, node in enumerate((a, b)):
                node.begin(round, first + 40 * i, 40, done=first)
            if parts:  # the record comes while the next round is trained
                assert applied(a, said, parts) == applied(b, said, parts)
            parts = {node.peer: node.end(round) for node in (a, b)}
            for i, part in enumerate(parts.values()):
                assert part["steps"] >= 1
                assert part["tokens"] == 32 * sum(y - x for x, y in part["used"])
                assert part["used"][0][0] == first + 40 * i
            first += 80
            said = record(round, parts, done=first)
            losses.append(float(np.mean([p["loss"] for p in parts.values()])))
            if round >= 6 and losses[-1] < losses[0] - 0.2:
                break
        digest = applied(a, said, parts)
        assert digest == applied(b, said, parts)
        assert losses[-1] < losses[0] - 0.2
        a.say("save")
        saved = a.hear("saved")
        assert saved["digest"] == digest
        stop(a, b)
    theta = state_files.load(Path(saved["path"]), Rule(lr=1.0), a.ready["params"], digest).theta
    found = newest(a.run_dir.checkpoints)
    assert found is not None
    embed = read_full(found)["embed.weight"].numpy().reshape(-1)
    assert np.array_equal(embed, theta[: len(embed)])
    steps = [r for r in records(a.run_dir.journal_file) if r["kind"] == "step"]
    assert [r["round"] for r in steps] == list(range(1, len(losses) + 1))
    assert steps[-1]["step"] == first // 8


def test_a_trainer_that_was_killed_comes_back_from_a_snapshot_and_records(tmp_path: Path, data: Path) -> None:
    with nodes(data, tmp_path, 1, 1) as (a, b):
        for node in (a, b):
            node.say("fresh", seed=5)
            node.hear("loaded")
            node.begin(1, 0, 40)
        parts = {node.peer: node.end(1) for node in (a, b)}
        said = record(1, parts)
        digest = applied(a, said, parts)
        a.say("save")
        saved = a.hear("saved")
        for node in (a, b):
            node.begin(2, 80, 40)
        parts2 = {node.peer: node.end(2) for node in (a, b)}
        said2 = record(2, parts2)
        expected = applied(a, said2, parts2)
        os.kill(b.ranks.pids[0], signal.SIGKILL)
        with b.trainer() as again:
            b.say("load", path=saved["path"], digest=digest)
            assert b.hear("loaded")["digest"] == digest
            assert applied(b, said2, parts2) == expected
            b.say("returned", round=2)  # of its life before: its samples travel with the next part
            b.begin(3, 200, 16)
            part = b.end(3)
            assert part["used"][0] == parts2["peer1"]["used"][0]
            assert part["used"][-1][0] == 200
            b.say("stop")
            assert [o.status for o in again.outcomes()] == [0]
        stop(a)


def test_halves_merge_to_the_same_weights(tmp_path: Path, data: Path) -> None:
    with nodes(data, tmp_path, 1, 1) as (a, b):
        for node in (a, b):
            node.say("fresh", seed=5)
            base = node.hear("loaded")["digest"]
        a.say("save")
        folder = a.hear("saved")["path"]
        branches = []
        for i, node in enumerate((a, b)):
            node.begin(1, 80 * i, 40)
            parts = {node.peer: node.end(1)}
            said = record(1, parts)
            applied(node, said, parts)
            branches.append([{"record": said, "parts": paths(parts)}])
        merged = {"kind": "merge", "round": 2, "parents": ["a", "b"]}
        digests = []
        for node in (a, b):
            node.say("merge", record=merged, base=folder, base_digest=base, branches=branches)
            answer = node.hear("applied")
            assert answer["hash"] == name_of(merged)
            digests.append(answer["digest"])
        assert digests[0] == digests[1]
        stop(a, b)


def test_scores_tell_a_good_part_from_one_that_was_turned_around(tmp_path: Path, data: Path) -> None:
    held_out = make_data(tmp_path / "held-out", documents=40, seed=1)
    with nodes(data, tmp_path, 1, **{"data.eval": str(held_out)}) as (a,):
        a.say("fresh", seed=5)
        a.hear("loaded")
        a.begin(1, 0, 400)
        a.say("begin", round=2, ranges=[], samples_done=0, seconds=30.0)
        a.hear("status")  # after a second of steps
        good = a.end(1)
        values = np.zeros(a.ready["params"], np.float32)
        codec("topk").add(Path(good["path"]).read_bytes(), values, -1.0)
        (tmp_path / "bad").write_bytes(codec("topk").encode(values, None, 0.0))
        (tmp_path / "junk").write_bytes(b"junk")
        tried = {"good": good["path"], "bad": str(tmp_path / "bad"), "junk": str(tmp_path / "junk")}
        a.say("score", round=1, parts=tried)
        scores = a.hear("scored")["scores"]
        assert scores["good"] < 0 < scores["bad"] < scores["junk"]
        a.say("end", round=2)  # a round without a sample is handed in, empty
        assert a.hear("part")["used"] == []
        stop(a)


def test_a_peer_evaluates_and_saves_as_its_own_run_file_says(tmp_path: Path, data: Path) -> None:
    held_out = make_data(tmp_path / "held-out", documents=8, seed=1)
    asked = {"data.eval": str(held_out), "eval.every": 10, "eval.windows": 4, "checkpoint.every": 15}
    with nodes(data, tmp_path, 1, **asked) as (a,):
        a.say("fresh", seed=5)
        a.hear("loaded")
        for round in range(1, 5):  # of 5 steps of 8 windows each
            a.begin(round, 40 * (round - 1), 40, done=40 * (round - 1))
            parts = {a.peer: a.end(round)}
            applied(a, record(round, parts, done=40 * round), parts)
        a.say("save")  # for newcomers: no checkpoint of this run, which asks for one every 15 steps
        a.hear("saved")
        stop(a)
    told = [(r["kind"], r["step"]) for r in records(a.run_dir.journal_file) if r["kind"] in ("eval", "checkpoint")]
    assert told == [("eval", 10), ("checkpoint", 15), ("eval", 20), ("checkpoint", 20)]  # the last one when it ended


@pytest.mark.parametrize(
    ("every", "saves"), [("auto", []), (0, []), (10, [10, 20]), ("30 s", [12, 25])], ids=["auto", "0", "steps", "time"]
)
def test_when_a_peer_saves(data: Path, every: int | str, saves: list[int]) -> None:
    due = Due(make_run(data, **{"checkpoint.every": every}), 0)
    due._saved_at = 0.0
    at = {5: 10.0, 9: 20.0, 10: 25.0, 12: 31.0, 20: 55.0, 25: 62.0}
    assert [step for step, now in at.items() if due.at(step, now)[1]] == saves
    came = Due(make_run(data, **{"checkpoint.every": 10}), None)  # to a run under way
    assert [came.at(step, 0.0)[1] for step in (0, 57, 58, 60, 60, 71)] == [False, False, False, True, False, True]
