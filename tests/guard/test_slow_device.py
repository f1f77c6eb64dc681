"""A slow GPU is named by its own clock, and no healthy one is: generated traces in virtual time."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from shoal.guard.others import median_of_others
from shoal.guard.slow_device import Kin, SlowDevices
from shoal.guard.straggler import OF_STEP, OWN, RATIO, Spent, Straggler, Stragglers, slow_ranks
from shoal.journal.beat import Beat, Marks

LOOK_S = 0.2
WITHIN = 20  # steps


@dataclass
class Devices:
    """The ranks of a run on GPUs, as their pulses tell of them. In each step a rank's blocks take as long as its
    documents ask for; now and then one is held up for a step or two (a compilation, a copy), or slow for a second; all
    of them are slow together for minutes (heat); evaluations and saves come between steps."""

    world: int
    step_s: float
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)  # rank → how many times as long
    slow_from: int = 50  # a step
    layers: Mapping[int, float] = field(default_factory=dict)  # rank → how much more it has to do than the others
    mates: int = 1  # ranks that wait for each other in every block

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._marks = [Marks(0.0) for _ in range(self.world)]
        self._blocks_s = [0.0] * self.world  # of the step before: a device is a step behind
        self._spells = [0.0] * self.world  # until when
        self.now, self.step = 0.0, 0

    def beats(self) -> dict[int, Beat]:
        return {rank: marks.beat(rank) for rank, marks in enumerate(self._marks)}

    def take_step(self) -> None:
        chance, began = self._chance, self.now
        warm = 1.0 + 0.15 * (self.step // 300 % 2)
        blocks_s = [self._work_s(rank) * warm for rank in range(self.world)]
        for first in range(0, self.world, self.mates):
            group = slice(first, first + self.mates)
            blocks_s[group] = [max(blocks_s[group])] * len(blocks_s[group])
        step_s = 3 * max(blocks_s) + 0.1 * self.step_s
        for rank, marks in enumerate(self._marks):
            data_s, launch_s = chance.uniform(0, 0.01) * step_s, chance.uniform(0.05, 0.3) * step_s
            at = began
            for phase, seconds in (("data", data_s), ("exchange", 0.0), ("forward", launch_s), ("backward", launch_s)):
                marks.mark(phase, self.step if phase == "data" else None, at)
                at += seconds
            marks.mark("clip", None, at)
            marks.mark("optimizer", None, began + 0.95 * step_s)
            marks.mark("record", None, began + step_s)
            if self.step:
                marks.worked(self._blocks_s[rank])
        self._blocks_s, self.now, self.step = blocks_s, began + step_s, self.step + 1
        if self.step % 100 == 0:
            self._between("evaluate", 5 * self.step_s)
        if self.step % 70 == 0:
            self._between("save", 2 * self.step_s)

    def _work_s(self, rank: int) -> float:
        chance, usual_s = self._chance, 0.3 * self.step_s * self.layers.get(rank, 1.0)
        share = 0.25  # of attention, which grows with the length of documents
        documents = statistics.fmean(min(6.0, chance.lognormvariate(-0.3, 0.8)) for _ in range(8))
        work_s = usual_s * (1 - share + share * documents) * chance.uniform(0.97, 1.03)
        if chance.random() < 0.004:
            work_s += chance.uniform(0.1, 20.0)  # a compilation between two marks
        if chance.random() < 0.001:
            self._spells[rank] = self.now + chance.uniform(0.5, 1.5)
        if self.now < self._spells[rank]:
            work_s *= 1.8
        return work_s * (self.slow.get(rank, 1.0) if self.step >= self.slow_from else 1.0)

    def _between(self, phase: str, seconds: float) -> None:
        for marks in self._marks:
            marks.mark(phase, None, self.now)
        self.now += seconds


def told(devices: Devices, kin: Kin | None, until_s: float) -> Iterator[tuple[int, Straggler]]:
    """(step, who), with looks five times a second."""
    by_device, by_host, looked = SlowDevices(kin), Stragglers(), 0.0
    while devices.now < until_s:
        devices.take_step()
        if devices.now - looked >= LOOK_S:
            looked, beats = devices.now, devices.beats()
            for one in (*by_device.look(beats, looked), *by_host.look(beats, looked)):
                yield devices.step, one


@pytest.mark.parametrize(("world", "step_s"), [(2, 1.0), (8, 0.5), (8, 8.0), (32, 2.0)])
def test_a_clean_hour_names_nobody(world: int, step_s: float) -> None:
    assert [one for _, one in told(Devices(world, step_s, seed=world), None, 3600.0)] == []


@pytest.mark.parametrize("factor", [1.5, 3.0])
@pytest.mark.parametrize(("world", "step_s"), [(2, 0.3), (2, 5.0), (16, 1.0)])
def test_a_slow_device_is_named_within_20_steps(world: int, step_s: float, factor: float) -> None:
    for seed in range(5):
        victim = seed % world
        devices = Devices(world, step_s, seed, slow={victim: factor})
        step, first = next(told(devices, None, 3600.0))
        assert (first.rank, first.phase, first.by, first.among) == (victim, "compute", "device", ())
        assert devices.slow_from < step <= devices.slow_from + WITHIN, (seed, step)


def test_it_is_told_again_after_a_while_not_at_each_look() -> None:
    devices = Devices(4, 1.0, slow={2: 2.0})
    assert 1 <= len([one for _, one in told(devices, None, 900.0)]) <= 2


def test_ranks_that_share_each_layer_are_named_together() -> None:
    """The slow one of four makes the other three wait in each block: by their devices they are alike."""
    devices = Devices(16, 1.0, slow={6: 2.0}, mates=4)
    step, first = next(told(devices, Kin(16, 4), 3600.0))
    assert (first.rank, first.among) == (4, (4, 5, 6, 7))
    assert step <= devices.slow_from + WITHIN
    assert list(told(Devices(4, 1.0, slow={1: 2.0}, mates=4), Kin(4, 4), 600.0)) == []  # with whom to compare them?


def test_a_stage_that_has_more_to_do_is_not_slow_and_a_slow_rank_of_it_is() -> None:
    heavy = dict.fromkeys(range(4, 8), 2.0)  # the second stage's layers have longer windows of attention
    assert list(told(Devices(8, 1.0, layers=heavy), Kin(4, 1), 600.0)) == []
    _, first = next(told(Devices(8, 1.0, layers=heavy, slow={1: 1.6}), Kin(4, 1), 600.0))
    assert first.rank == 1


def test_the_median_of_others_is_that() -> None:
    chance = random.Random(0)
    for n in range(2, 40):
        values = [float(chance.randrange(5)) if n % 2 else chance.random() for _ in range(n)]
        expected = [statistics.median(values[:i] + values[i + 1 :]) for i in range(n)]
        assert median_of_others(np.array(values)).tolist() == expected


def test_slow_ranks_are_those_that_comparing_each_with_all_others_finds() -> None:
    chance, named = random.Random(0), 0
    for _ in range(300):
        ranks = range(chance.randrange(2, 9))
        before = {r: Tally(0, dict.fromkeys(OWN, 0.0)) for r in ranks}
        after: dict[int, Spent] = {
            r: Tally(10, {phase: chance.choice((0.1, 1.0, 3.0)) * chance.random() for phase in OWN}) for r in ranks
        }
        found = [(s.rank, s.phase, s.own_s, s.usual_s) for s in slow_ranks(before, after, 3.0)]
        assert found == _one_by_one(after, 3.0)
        named += len(found)
    assert named > 100


def _one_by_one(after: Mapping[int, Spent], seconds: float) -> list[tuple[int, str, float, float]]:
    own = {rank: {phase: b.spent_s[phase] / b.steps for phase in OWN} for rank, b in after.items()}
    found = []
    for rank, mine in own.items():
        others = [o for other, o in own.items() if other != rank]
        usual_s, total_s = statistics.median(sum(o.values()) for o in others), sum(mine.values())
        if total_s > RATIO * usual_s and total_s - usual_s >= OF_STEP * seconds / after[rank].steps:
            usual = {phase: statistics.median(o[phase] for o in others) for phase in OWN}
            phase = max(OWN, key=lambda phase: mine[phase] - usual[phase])
            found.append((rank, OWN[phase], mine[phase], usual[phase]))
    return sorted(found, key=lambda one: one[3] - one[2])


@dataclass(frozen=True)
class Tally:
    steps: int
    spent_s: dict[str, float]
    device_s: float = -1.0
