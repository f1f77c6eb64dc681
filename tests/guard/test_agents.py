"""The agents of islands as the supervisor sees them: what ends one is named, and it is started again within a budget.

The agents are real processes, but do only what a test tells them; with real ones: tests/guard/test_islands.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from shoal.guard import island_agents
from shoal.guard.classify import Failure
from shoal.guard.island_agents import Agents
from shoal.guard.signals import Signals
from shoal.guard.watch import Ended
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.spec.run import Guard

RESTARTS = 2
WAIT = "import pathlib, time\nwhile not pathlib.Path('{0}/done').exists(): time.sleep(0.02)"
KILLED = "import os\nos.kill(os.getpid(), 9)"
FULL = "raise OSError(28, 'No space left on device')"


class Fleet:
    """Island 0 waits until all is told that is to be told; island 1 does what `one` says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, one: str) -> None:
        self._run_dir = RunDir(folder / "runs" / "demo")
        self._run_dir.path.mkdir(parents=True)
        self._journal, self._step = Journal(self._run_dir.journal_file), 0
        self._done = folder / "done"
        self.told: list[tuple[int, Failure, str]] = []
        code = {0: WAIT.format(folder), 1: one}
        monkeypatch.setattr(island_agents, "command", lambda run_dir, island: [sys.executable, "-c", code[island]])

    def steps_of(self, *members: int) -> None:
        self._step += 1
        self._journal.append("step", step=self._step, islands=list(members))

    def run(self, enough: int, tick: Callable[[], None] = lambda: None) -> Ended:
        """Until so many failures were told, and no island is left."""

        def look() -> None:
            tick()
            if len(self.told) >= enough:
                self._done.touch()

        guard = Guard(restarts=RESTARTS, backoff_s=0.05)
        note = lambda *what: self.told.append(what)  # noqa: E731
        with Signals() as signals, closing(Agents(self._run_dir, 2, guard, note)) as agents:
            return agents.watch(signals, 5.0, lambda number: None, look)


def test_an_agent_that_is_killed_again_and_again_is_named_and_given_up_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, monkeypatch, KILLED)
    ended = fleet.run(RESTARTS + 1, lambda: fleet.steps_of(0))  # what island 0 does is no progress of island 1
    assert ended.failure is None
    assert [island for island, _, _ in fleet.told] == [1] * (RESTARTS + 1)
    assert {(f.cause, f.evidence) for _, f, _ in fleet.told} == {("killed", "its agent: ended by SIGKILL")}
    assert [action for _, _, action in fleet.told] == [
        "restart island 1 in 0.05 s; the others go on",
        "restart island 1 in 0.1 s; the others go on",
        "give up this island: 2 restarts in a row made no progress",
    ]


def test_an_island_that_takes_part_may_be_started_any_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, monkeypatch, KILLED)
    fleet.run(2 * RESTARTS + 2, lambda: fleet.steps_of(0, 1))
    assert not [action for _, _, action in fleet.told if "give up" in action]


def test_an_agent_that_fails_is_named_by_what_its_log_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, monkeypatch, FULL)
    assert fleet.run(1).failure is None
    _, failure, _ = fleet.told[0]
    assert (failure.cause, failure.rank, failure.exit_code) == ("disk-full", None, 1)
    assert "No space left on device" in failure.evidence


def test_an_agent_that_cannot_be_started_again_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, monkeypatch, KILLED)
    log = tmp_path / "runs" / "demo" / "logs" / "island-001.log"

    def in_the_way() -> None:
        if fleet.told and not log.is_dir():
            log.unlink()
            log.mkdir()

    assert fleet.run(RESTARTS + 1, in_the_way).failure is None
    assert [f.cause for _, f, _ in fleet.told] == ["killed", "environment", "environment"]
    assert "its agent cannot be started: " in fleet.told[1][1].evidence
