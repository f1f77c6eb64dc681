"""A real run that hangs: forked ranks of the real worker, and the watch beside them as the supervisor has it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.guard.fake import until
from tests.ranks import Ranks, started
from tests.train.tiny import make_data, make_run

from shoal.data.feed import Feed
from shoal.guard.hang import Hang, Limits, Watch
from shoal.guard.straggler import Straggler, Stragglers
from shoal.model.decoder import Decoder
from shoal.observe.pulse import Pulse, read_beat
from shoal.parallel.place import Place, join
from shoal.parallel.standing import standing
from shoal.track.rundir import RunDir
from shoal.train.decide import decide
from shoal.train.worker import work

LIMITS = Limits(quick_s=1.0)
AT_STEP = 12


@contextmanager
def training(
    tmp_path: Path, world: int, break_it: Callable[[int], None] = lambda rank: None, **changes: Any
) -> Iterator[tuple[Ranks, Path]]:
    """A run that never ends by itself; `break_it(rank)` is called in each rank before it trains. When this is entered
    all ranks have made some steps."""
    run = make_run(make_data(tmp_path / "data"), **{"train.steps": 1_000_000, "train.batch": 12, **changes})
    decided, run_dir, pulses = decide(run, tmp_path, world), RunDir.of(run.name, tmp_path), tmp_path / "pulses"
    run_dir.path.mkdir(parents=True)
    pulses.mkdir()

    def rank(rank: int, world: int) -> None:
        pulse = Pulse(pulses, rank)
        break_it(rank)
        place = join(decided.run)
        pulse.watch_groups(standing(place))
        pulse.mark("load")
        work(run_dir, decided.run, place, lambda: False, pulse)

    with started(rank, world, timeout_s=120) as ranks:
        until(lambda: all((b := read_beat(pulses, r)) and b.steps > 8 for r in range(world)), within_s=60)
        yield ranks, pulses


def named(ranks: Ranks, pulses: Path, within_s: float = 30) -> Hang:
    watch = Watch(dict(enumerate(ranks.pids)), pulses, LIMITS)
    return until(lambda: watch.verdict(time.monotonic()), within_s)


def test_a_rank_that_is_stopped_at_any_moment_is_named(tmp_path: Path) -> None:
    chance = random.Random()
    with training(tmp_path, 3) as (ranks, pulses):
        victim = chance.randrange(3)
        time.sleep(1.5 + chance.random())  # its stack is looked at once a second, also before there were steps
        os.kill(ranks.pids[victim], signal.SIGSTOP)
        hang = named(ranks, pulses)
        assert (hang.rank, hang.stopped) == (victim, True)
        assert any(frame.startswith("shoal/train/loop.py") for frame in hang.stack), hang
        assert {o.rank for o in hang.others} == set(range(3)) - {victim}


def _on_step(step: int, what: Callable[[], None]) -> None:
    """In this process, the feed does that when it assembles that step."""
    assemble = Feed.assemble

    def broken(self: Feed, t: int) -> Any:
        if t == step:
            what()
        return assemble(self, t)

    Feed.assemble = broken  # type: ignore[method-assign]


def asleep_in_a_read() -> None:
    time.sleep(600)


def test_a_rank_whose_data_never_comes_is_named(tmp_path: Path) -> None:
    def break_it(rank: int) -> None:
        if rank == 1:
            _on_step(AT_STEP, asleep_in_a_read)

    with training(tmp_path, 2, break_it) as (ranks, pulses):
        hang = named(ranks, pulses)
    assert (hang.rank, hang.phase, hang.step, hang.stopped) == (1, "data", AT_STEP + 1, False)
    assert hang.place.endswith("asleep_in_a_read")
    (other,) = hang.others
    assert other.phase == "exchange"
    assert other.where.startswith("all_reduce at shoal/parallel/place.py")


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_a_rank_that_deadlocks_in_the_model_is_named(tmp_path: Path) -> None:
    def break_it(rank: int) -> None:
        if rank == 0:
            calls, forward = iter(range(10**9)), Decoder.forward

            def broken(self: Decoder, *args: Any) -> Any:
                if next(calls) == AT_STEP:
                    deadlock()
                return forward(self, *args)

            Decoder.forward = broken  # type: ignore[method-assign]

    with training(tmp_path, 2, break_it) as (ranks, pulses):
        hang = named(ranks, pulses)
    assert (hang.rank, hang.phase) == (0, "forward")
    assert hang.place.endswith("deadlock")
    assert [o.phase for o in hang.others] == ["backward"]


def test_a_rank_that_leaves_a_collective_out_is_named_by_the_count_of_its_group(tmp_path: Path) -> None:
    """Both are in the same phase; only one has begun the collective."""

    def break_it(rank: int) -> None:
        if rank == 1:
            calls, total = iter(range(10**9)), Place.sum_on_device

            def broken(self: Place, value: torch.Tensor) -> torch.Tensor:
                if next(calls) == 5 * AT_STEP:  # it is asked at most so often in a step
                    threading.Event().wait()
                return total(self, value)

            Place.sum_on_device = broken  # type: ignore[method-assign]

    with training(tmp_path, 2, break_it, **{"mesh.dp_shard": 2}) as (ranks, pulses):
        hang = named(ranks, pulses)
    assert (hang.rank, hang.phase) == (1, "clip")
    assert "has not begun collective" in hang.why
    assert [o.phase for o in hang.others] == ["clip"]


@pytest.mark.parametrize("where", ["data", "compute", "nowhere"])
def test_a_slow_rank_is_named_with_the_phase_in_which_it_is_slow(tmp_path: Path, where: str) -> None:
    def break_it(rank: int) -> None:
        if rank == 1 and where == "data":
            assemble = Feed.assemble
            Feed.assemble = lambda self, t: (time.sleep(0.1), assemble(self, t))[1]  # type: ignore[method-assign]
        if rank == 1 and where == "compute":
            forward = Decoder.forward
            Decoder.forward = lambda self, *args: (time.sleep(0.1), forward(self, *args))[1]  # type: ignore[method-assign]

    with training(tmp_path, 3, break_it) as (ranks, pulses):
        watch, stragglers = Watch(dict(enumerate(ranks.pids)), pulses), Stragglers(seconds=0.7)
        found: list[Straggler] = []
        deadline = time.monotonic() + (2 if where == "nowhere" else 30)
        while time.monotonic() < deadline and not found:
            assert watch.verdict(time.monotonic()) is None
            found += stragglers.look(watch.beats, time.monotonic())
            time.sleep(0.1)
    if where == "nowhere":
        assert all(s.own_s < 0.1 for s in found)  # a busy machine may make one slow, but not as slow as that
    else:
        assert [(s.rank, s.phase) for s in found] == [(1, where)]
        assert found[0].own_s > 1.3 * found[0].usual_s
