"""A real run that hangs: forked ranks of the real worker, and the watch beside them as the supervisor has it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.guard.fake import until
from tests.ranks import Ranks, started
from tests.train.tiny import make_data, make_run

from shoal.data.feed import Feed
from shoal.decide.auto import decide
from shoal.guard.hang import Hang, Limits, Watch
from shoal.guard.signs import signs_of
from shoal.guard.straggler import OWN, Spent, Straggler, Stragglers
from shoal.journal.beat import UNKNOWN_S
from shoal.journal.pulse import Pulse
from shoal.journal.pulse_file import PulseFolder, read_beat, read_sample
from shoal.journal.rundir import RunDir
from shoal.model.decoder import Decoder
from shoal.parallel.place import Place, join
from shoal.parallel.standing import standing
from shoal.train.worker import work

AT_STEP = 12
LOOP = "shoal/train/loop.py"
TICK_S = 0.25


@contextmanager
def training(
    tmp_path: Path,
    world: int,
    break_it: Callable[[int], None] = lambda rank: None,
    after_steps: int = 8,
    **changes: Any,
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

    with started(rank, world, timeout_s=400) as ranks:
        until(lambda: all((b := read_beat(pulses, r)) and b.steps > after_steps for r in range(world)), within_s=180)
        yield ranks, pulses


def named(ranks: Ranks, pulses: Path) -> Hang:
    """Once they stand still the time of the watch is the test's own, so that a busy machine only makes it slow."""
    until(lambda: stand_still(ranks, pulses), within_s=180)
    now, watch = time.monotonic(), Watch(dict(enumerate(ranks.pids)), PulseFolder(pulses))
    beats = [beat for r in range(len(ranks.pids)) if (beat := read_beat(pulses, r))]
    within_s = max(10.0, 3 * max(beat.slowest_s for beat in beats))
    looks = (watch.verdict(now + TICK_S * i) for i in range(round(within_s / TICK_S)))
    found = next((hang for hang in looks if hang is not None), None)
    assert found is not None
    assert not found.works
    return found


def stand_still(ranks: Ranks, pulses: Path) -> bool:
    """For a second no rank marks anything or so much as waits for a core."""
    marks = [read_beat(pulses, rank) for rank in range(len(ranks.pids))]
    for _ in range(10):
        time.sleep(0.1)
        if any(signs_of(pid).state not in "StT" for pid in ranks.pids):
            return False
    return marks == [read_beat(pulses, rank) for rank in range(len(ranks.pids))]


def test_a_rank_that_is_stopped_at_any_moment_is_named(tmp_path: Path) -> None:
    chance = random.Random()
    with training(tmp_path, 3) as (ranks, pulses):
        victim = chance.randrange(3)
        until(lambda: (s := read_sample(pulses, victim)) and any(f.startswith(LOOP) for f in s.stack), within_s=60)
        time.sleep(chance.random())
        os.kill(ranks.pids[victim], signal.SIGSTOP)
        hang = named(ranks, pulses)
        assert (hang.rank, hang.stopped) == (victim, True)
        assert any(frame.startswith(LOOP) for frame in hang.stack), hang
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
    # A batch is looked at during the step before its own.
    assert (hang.rank, hang.phase, hang.step, hang.stopped) == (1, "data", AT_STEP, False)
    assert hang.place.endswith("asleep_in_a_read")
    (other,) = hang.others
    assert other.phase == "backward"  # where gradients meet: the sums about the next step nobody waits for
    assert " at shoal/parallel/laid.py" in other.where


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


def test_a_healthy_run_with_slow_steps_is_not_ended_in_its_third_step(tmp_path: Path) -> None:
    """Each step takes much longer than the limit, and none has been measured before the third one is over: it was ended
    there, restarted from step 0, and ended there again (issue 19)."""

    def break_it(rank: int) -> None:
        forward = Decoder.forward
        Decoder.forward = lambda self, *args: (time.sleep(0.6), forward(self, *args))[1]  # type: ignore[method-assign]

    with training(tmp_path, 1, break_it, after_steps=0) as (ranks, pulses):
        watch = Watch(dict(enumerate(ranks.pids)), PulseFolder(pulses), Limits(quick_s=0.2))

        def past_the_third_step() -> bool:
            hang = watch.verdict(time.monotonic())
            assert hang is None or hang.works, hang.evidence
            beat = read_beat(pulses, 0)
            return beat is not None and beat.steps > 3

        until(past_the_third_step, within_s=180)
        beat = read_beat(pulses, 0)
        assert beat is not None
        assert beat.slowest_s > 0.6


class Dawdle:
    """Takes as long as all else since it did so last: half of the time, however busy the machine is."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def __call__(self) -> None:
        time.sleep(max(0.1, time.monotonic() - self._since))
        self._since = time.monotonic()


@pytest.mark.parametrize("where", ["data", "compute"])
def test_a_slow_rank_is_named_with_the_phase_in_which_it_is_slow(tmp_path: Path, where: str) -> None:
    def break_it(rank: int) -> None:
        if rank == 1:
            dawdle = Dawdle()
            owner, name = (Feed, "step") if where == "data" else (Decoder, "forward")
            real = getattr(owner, name)
            setattr(owner, name, lambda *args: (dawdle(), real(*args))[1])

    with training(tmp_path, 3, break_it) as (ranks, pulses):
        watch, stragglers = Watch(dict(enumerate(ranks.pids)), PulseFolder(pulses)), Stragglers(seconds=0.7)
        found: list[Straggler] = []

        def is_named() -> bool:
            """A busy machine may make another one slow for a while."""
            hang = watch.verdict(time.monotonic())
            assert hang is None or hang.works, hang.evidence
            found.extend(stragglers.look(watch.beats, time.monotonic()))
            return (1, where) in {(s.rank, s.phase) for s in found}

        until(is_named, within_s=180)
    slow = next(s for s in found if (s.rank, s.phase) == (1, where))
    assert slow.own_s > 1.3 * slow.usual_s


def test_ranks_that_take_as_long_as_each_other_are_not_slow() -> None:
    """Each spends a little more than another now and then, none of them always."""
    chance, stragglers, spent = random.Random(1), Stragglers(), dict.fromkeys(range(3), 0.0)
    for step in range(3, 400):
        beats: dict[int, Spent] = {}
        for rank in spent:
            spent[rank] += chance.uniform(0.4, 0.5)
            beats[rank] = Tally(step, {**dict.fromkeys(OWN, 0.0), "forward": spent[rank]})
        assert stragglers.look(beats, float(step)) == []


@dataclass(frozen=True)
class Tally:
    steps: int
    spent_s: dict[str, float]
    device_s: float = UNKNOWN_S
