"""The watch looks at columns of ranks, and only at those that have news: what it says is what looking at each says."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from tests.guard.by_rank import WatchByRank
from tests.guard.crowd import Crowd
from tests.guard.traces import FAULTS, Group, Trace, broken, healthy

from shoal.guard.hang import Hang, Watch
from shoal.guard.signs import Kernel, Signs, Threads
from shoal.guard.straggler import Stragglers, slow_ranks
from shoal.guard.suspect import waited_for
from shoal.islands.pace import Tally
from shoal.journal import pulse_file
from shoal.journal.beat import Beat
from shoal.journal.pulse_file import Sample

MOST_LOOKS = 1500
TICK_S = 0.5
AFTER = 20  # looks, once somebody has been named


class Agents(Kernel):
    """Stands between a group and its watch: now and then it hears of some of the ranks, and for a while of none."""

    def __init__(self, group: Group, seed: int) -> None:
        super().__init__()
        self._group, self._chance = group, random.Random(seed)
        self._known: dict[int, tuple[Beat, Sample, Signs, Threads]] = {}
        self._heard = dict.fromkeys(group.pids, 0.0)
        self._news: list[int] = list(group.pids)
        self._silent_until = 0.0
        self.hear(list(group.pids), 0.0)

    def hear(self, ranks: list[int], now: float) -> None:
        for rank in ranks:
            pid, g = self._group.pids[rank], self._group
            self._known[rank] = g.beat(rank), g.sample(rank), g.signs(rank, pid), g.threads(rank, pid)
            self._heard[rank] = now
        self._news = ranks

    def advance(self, now: float) -> None:
        if self._chance.random() < 0.01:
            self._silent_until = now + self._chance.uniform(0, 8)
        some = [rank for rank in self._known if now >= self._silent_until and self._chance.random() < 0.4]
        self.hear(some, now)

    def beat(self, rank: int) -> Beat:
        return self._known[rank][0]

    def sample(self, rank: int) -> Sample:
        return self._known[rank][1]

    def signs(self, rank: int, pid: int) -> Signs:
        return self._known[rank][2]

    def threads(self, rank: int, pid: int) -> Threads:
        return self._known[rank][3]

    def fresh(self) -> list[int]:
        return self._news

    def unheard(self, now: float, seconds: float) -> list[int]:
        return [rank for rank, at in self._heard.items() if now - at > seconds]


def _both(trace: Trace, far: bool) -> tuple[int, list[tuple[Hang | None, Hang | None]]]:
    """What the two say at each look; how often it was something."""
    group = Group(trace)
    agents = Agents(group, trace.seed) if far else None
    source = agents or group
    new, old = Watch(group.pids, source, kernel=source), WatchByRank(group.pids, source, kernel=source)
    said, named, now = [], 0, 0.0
    while not group.over and named < AFTER and len(said) < MOST_LOOKS:
        now += TICK_S
        group.advance(now)
        if agents:
            agents.advance(now)
        said.append((new.verdict(now), old.verdict(now)))
        named += said[-1][0] is not None
    return named, said


@pytest.mark.parametrize("far", [False, True], ids=["this machine", "other nodes"])
def test_columns_say_what_looking_at_each_rank_says(far: bool) -> None:
    named = 0
    for seed in range(5):
        fault = (None, *FAULTS)[seed % 5]
        trace = healthy(seed, most_s=0.5) if fault is None else broken(seed, fault, most_s=0.5)
        found, said = _both(replace(trace, world=2 + seed, micro_batches=2), far)
        named += found
        for new, old in said:
            assert new == old, trace.about
    assert named >= 2 * AFTER, "hardly anybody was named: this test says nothing"


def test_who_is_waited_for_is_who_is_behind_in_a_group_and_ahead_in_none() -> None:
    chance = random.Random(0)
    for _ in range(200):
        groups = [{name: chance.randrange(3) for name in chance.sample("abcd", 2)} for _ in range(5)]
        expected = set()
        for i, mine in enumerate(groups):
            pairs = [(begun, g[name]) for name, begun in mine.items() for g in groups if name in g]
            if any(a < b for a, b in pairs) and not any(a > b for a, b in pairs):
                expected.add(i)
        assert waited_for(groups).keys() == expected


def test_a_look_at_four_times_as_many_ranks_costs_about_four_times_as_much() -> None:
    """By CPU time, of the best of four. Comparing pairs would be sixteen times as much. (benchmarks/watch_ranks.py
    has the times of 4,096.)"""

    def cost_s(world: int, kind: str) -> float:
        crowd, spent_s = Crowd(world, kind), 0.0
        watch, stragglers = Watch(crowd.pids, crowd.kernel, kernel=crowd.kernel), Stragglers(seconds=1.0)
        for _ in range(6):
            crowd.advance()
            began = time.process_time()
            watch.verdict(crowd.now)
            stragglers.look(watch.beats, crowd.now)
            slow_ranks(dict.fromkeys(watch.beats, Tally()), watch.beats, 1.0)
            spent_s += time.process_time() - began
        return spent_s

    for kind in ("computing", "marking"):
        few, many = (min(cost_s(world, kind) for _ in range(4)) for world in (256, 1024))
        assert many < 7 * few, kind


@pytest.mark.parametrize(("kind", "texts"), [("marking", 0), ("waiting", 20)])
def test_where_ranks_are_is_decoded_only_of_those_that_make_no_progress(
    kind: str, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is half of what a look costs, and of ranks that go on nobody asks."""
    decoded = []
    for name in ("_facts", "_stacks"):
        real = getattr(pulse_file, name)
        monkeypatch.setattr(pulse_file, name, lambda text, real=real: (decoded.append(text), real(text))[1])
    crowd = Crowd(20, kind)
    watch = Watch(crowd.pids, crowd.kernel, kernel=crowd.kernel)
    for _ in range(12):
        crowd.advance()
        watch.verdict(crowd.now)
    assert bool(decoded) == bool(texts)
    assert len(decoded) >= texts
