"""Patterns of loss that nobody hopes for: all but one at once, dead and frozen together, one that dies again and again,
one that never comes, clocks that jump. The run is, to the bit, that of one process which nobody disturbed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.islands.member import SILENT_S
from tests.islands.shore import Shore, alone

STEPS, SHARDS = 60, 16


@pytest.fixture(scope="module")
def expected() -> str:
    return alone(STEPS, SHARDS)


@pytest.fixture
def shore(tmp_path: Path) -> Iterator[Shore]:
    with Shore(tmp_path, steps=STEPS, shards=SHARDS) as shore:
        yield shore


@pytest.mark.parametrize("left", [0, 2])
def test_all_but_one_are_killed_at_once_and_the_last_one_finishes(shore: Shore, expected: str, left: int) -> None:
    shore.start(0, 1, 2, 3)
    shore.wait_for_step(15)
    others = [island for island in range(4) if island != left]
    for island in others:  # all dead before the first is missed
        shore.signal(island, signal.SIGKILL)
    for island in others:
        shore.kill(island)
    assert shore.wait() == {left: 0}
    assert shore.check() == expected


def test_one_is_killed_and_another_stopped_in_the_same_moment(shore: Shore, expected: str) -> None:
    shore.step_s = 0.1
    shore.start(0, 1, 2, 3)
    shore.wait_for_step(8)
    shore.signal(0, signal.SIGSTOP)  # the first member
    shore.kill(2)
    stopped = shore.step()
    shore.wait_for_step(stopped + 4, timeout_s=SILENT_S + 60)
    shore.signal(0, signal.SIGCONT)
    assert shore.wait() == {0: 0, 1: 0, 3: 0}
    assert shore.check() == expected


def test_the_same_island_killed_again_and_again_holds_nobody_up(shore: Shore, expected: str) -> None:
    """As soon as it takes part, and also while it still looks for the others or receives the state."""
    shore.step_s = 0.05
    shore.start(0, 1, 2)
    shore.wait_for_step(3)
    kills = 0
    for again in range(8):
        seen = len(shore.log(2))
        if again % 2:
            time.sleep(0.05 * again)  # wherever it is by then
        else:
            until = time.monotonic() + 60
            while len(shore.log(2)) < seen + 2 and shore.step() < STEPS - 8 and time.monotonic() < until:
                time.sleep(0.01)
        if 2 not in shore.pids or shore.step() >= STEPS - 8:
            break
        shore.kill(2)
        shore.start(2)
        kills += 1
    assert set(shore.wait().values()) == {0}
    assert shore.check() == expected
    assert kills >= 3
    for island in (0, 1):  # nobody else had to begin again, or was taken for dead
        assert [r["kind"] for r in shore.log(island) if r["kind"] != "step"] == ["entered", "finished"]


def test_one_that_never_comes_is_not_waited_for(shore: Shore, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.islands.enter.GATHER_S", 0.5)
    shore.start(0, 2, 3)
    assert shore.wait() == {0: 0, 2: 0, 3: 0}
    assert shore.check() == expected


def test_clocks_that_jump_by_hours_put_nobody_out(shore: Shore, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is alive, and who may commit, goes by clocks that nobody can set."""
    real, monotonic = time.time, time.monotonic

    def jumping() -> float:
        return real() + 3600 * (int(monotonic() * 5) % 3 - 1)  # an hour back, right, an hour ahead; 5 times a second

    monkeypatch.setattr(time, "time", jumping)
    shore.step_s = 0.05
    shore.start(0, 1, 2, 3)
    shore.wait_for_step(15)
    shore.kill(1)
    shore.start(1)
    assert set(shore.wait().values()) == {0}
    assert shore.check() == expected
    for island in (0, 2, 3):
        assert [r["kind"] for r in shore.log(island) if r["kind"] != "step"] == ["entered", "finished"]
