"""Islands that were frozen as a whole, and wake up when others have gone on from the checkpoint."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from shoal.islands import enter, lease
from shoal.islands.epoch import Epoch, Fence
from tests.islands.shore import Shore, alone
from tests.patience import Stopwatch

STEPS = 150


def newest(shore: Shore) -> Epoch:
    found = Fence(shore.folder / "fleet").newest()
    assert found is not None
    return found


def test_who_wakes_up_after_the_others_have_gone_on_takes_no_step_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused machine: nobody in it notices. Its lease has run out; writing it again does not mend that."""
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    monkeypatch.setattr(lease, "FRESH_S", 2.0)
    monkeypatch.setattr(enter, "DEAD_S", 3.0)
    monkeypatch.setattr(enter, "GATHER_S", 0.5)
    with Shore(tmp_path, islands=2, steps=STEPS, step_s=0.05) as shore:
        shore.start(0, 1)
        shore.wait_for_step(5)
        shore.kill(1)
        before = newest(shore).number
        shore.wait_for_step(shore.step() + 5)
        shore.signal(0, signal.SIGSTOP)
        shore.start(1)
        watch = Stopwatch()
        while newest(shore).life == 1:
            assert watch.quiet_s() < 60
            time.sleep(0.05)
        asleep = len(shore.log(0))
        shore.signal(0, signal.SIGCONT)
        assert set(shore.wait(90).values()) == {0}
        awake = [record["kind"] for record in shore.log(0)[asleep:]]
        assert awake[: awake.index("evicted")].count("step") <= 1  # one that was decided before
        assert newest(shore).number > before
        assert shore.check() == alone(STEPS, shore.shards)
