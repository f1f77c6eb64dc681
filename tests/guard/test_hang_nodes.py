"""A rank on another node is judged by what its node's agent passes on: its pulse, and what its threads do."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.guard.fake import until
from tests.guard.pretended import COMPUTES_S, ENDLESS, SLEEPS, TICK_S, WAITS, Group

from shoal.guard.hang import Hang, Limits, Watch
from shoal.guard.nodes.group import NodeGroup
from shoal.guard.nodes.process_states import Kernels
from shoal.guard.nodes.share import RunningShare
from shoal.guard.nodes.talk import packed
from shoal.guard.progress import Progress
from shoal.guard.ranks import UNHEARD_S
from shoal.guard.signs import signs_of
from shoal.guard.surroundings import Surroundings
from shoal.guard.workers import Share, log_file
from shoal.journal.pulse_file import PulseFolder
from shoal.journal.rundir import RunDir
from shoal.spec.run import Guard


class FarGroup:
    """All ranks of the group are on another node, whose agent is asked for its messages."""

    def __init__(self, group: Group, here: Path) -> None:
        self.group, self.kernel = group, Kernels(range(0), PulseFolder(here))
        workers: Any = SimpleNamespace(pids=group.pids, pulses=group.folder)
        self._agent = RunningShare(RunDir(here), 0, workers, Surroundings.now(here), shared=True, every_s=0.0)
        self.watch = Watch(group.pids, self.kernel, kernel=self.kernel)

    def send(self, kind: str, **fields: Any) -> None:
        """As the line to node 0 does."""
        if kind == "pulse":
            self.kernel.take(json.loads(json.dumps(fields)), self.group.now)

    def looks(self, seconds: float, tick_s: float = TICK_S, happens: Callable[[], object] | None = None) -> list[Hang]:
        """`happens`: what is waited for before each look; None: nothing is heard of the node either."""
        found = []
        for _ in range(round(seconds / tick_s)):
            self.group.now += tick_s
            if happens is not None:
                happens()
                self._agent.send_pulses(self)  # type: ignore[arg-type]  # a line that only sends
            if hang := self.watch.verdict(self.group.now):
                found.append(hang)
        return found


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def test_a_rank_that_sleeps_on_another_node_is_named(group: Group, here: Path) -> None:
    group.start(WAITS, SLEEPS)
    found = FarGroup(group, here).looks(10, happens=lambda: None)
    assert found
    assert all((h.rank, h.phase, h.works) == (1, "data", False) for h in found)


def test_a_rank_that_computes_on_another_node_is_told_and_not_ended(group: Group, here: Path) -> None:
    group.start('pulse.mark("forward"); ' + WAITS, ENDLESS)
    found = FarGroup(group, here).looks(14, COMPUTES_S, group.computes(1))
    assert found
    assert all((h.rank, h.works) == (1, True) for h in found)


def test_time_in_which_nothing_is_heard_of_a_node_does_not_count(group: Group, here: Path) -> None:
    """Who does not know does not judge: that a node is lost is found out by others, and is another failure."""
    group.start(WAITS, SLEEPS)
    far = FarGroup(group, here)
    assert not far.looks(2, happens=lambda: None)
    assert not far.looks(60 + UNHEARD_S)
    assert far.looks(8, happens=lambda: None)


@pytest.mark.parametrize(("nodes", "least_s", "most_s"), [(1, 6, 11), (2, 40, 50)])
def test_between_nodes_a_hang_is_named_when_nccl_would_have_given_up_its_tries(
    group: Group, nodes: int, least_s: float, most_s: float
) -> None:
    """A link that is away for half a minute is no hang, where there are links."""
    group.start(WAITS, SLEEPS)
    began, told = group.now, list[str]()
    note: Callable[..., None] = lambda kind, **_: told.append(kind)  # noqa: E731
    progress = Progress(group.pids, group.folder, group.folder, Guard(), note, nodes=nodes)
    assert group.looks(progress, most_s) is not None
    assert least_s < group.now - began < most_s
    assert told == ["hang"]


def test_a_stopped_process_is_named_as_soon_between_nodes_and_a_limit_of_ones_own_holds(group: Group) -> None:
    assert Limits.of("auto", 2).stopped_s == Limits.of("auto", 1).quick_s
    assert Limits.of("20 s", 2) == Limits.of("20 s", 1) == Limits(20.0)
    group.start(WAITS, SLEEPS)
    os.kill(group.pids[1], signal.SIGSTOP)
    until(lambda: signs_of(group.pids[1]).stopped)
    progress = Progress(group.pids, group.folder, group.folder, Guard(), lambda kind, **_: None, nodes=2)
    failure = group.looks(progress, 10)
    assert failure is not None
    assert "is in state T" in failure.evidence


def test_an_agent_speaks_for_its_own_ranks_alone(here: Path) -> None:
    node, group = Mock(number=1, words="node 1"), NodeGroup.__new__(NodeGroup)
    group.attempt, group._log_folder, group._pids = 0, here, {2: 12, 3: 13, 4: 14}
    group.kernel = Kernels(range(2), PulseFolder(here))
    group._others = {node: Share(1, 2, 2, ("node0", 4000))}
    about = {"state": "T", "io_bytes": 0, "pulse": ""}
    said = {"kind": "pulse", "attempt": 0, "now": 0.0, "ranks": {str(rank): about for rank in (0, 3, 4, 10**9)}}
    group._take(node, said)
    assert group.kernel.fresh() == [0, 1, 3]
    for rank in (0, 3):
        group._take(node, {"kind": "log", "attempt": 0, "rank": rank, "data": packed(b"words")})
    for kind in ("started", "died"):
        group._take(node, {"kind": kind, "attempt": 0, "pids": {"4": 99}, "rank": 4, "exit_code": 1})
    assert group._pids == {2: 12, 3: 13, 4: 14}
    assert [log_file(here, 0, rank).exists() for rank in (0, 3)] == [False, True]
