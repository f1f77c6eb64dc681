"""Generated runs in virtual time, for the watch over hangs: what each rank marks, computes and waits for, by seed.

A trace is a group of ranks that follow programs of spans: a phase, how long, and what the kernel and the device show
meanwhile. Steps last from 10 ms to 30 min, with 1 to 512 micro-batches, on CPUs (gloo) or GPUs (NCCL); they drift, come
in bursts, run on a loaded machine, compile again, evaluate, save, read from slow disks. `broken` is the same with one
rank that is stopped, sleeps, deadlocks or loops for ever. The ranks' marks go through the code of a real worker
(shoal.journal.beat), the verdict through the code of the supervisor (shoal.guard.hang); only clocks are made up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shoal.guard.hang import Hang, Watch
from shoal.guard.signs import Kernel, Signs, Threads
from shoal.journal.beat import Beat, Marks
from shoal.journal.pulse_file import Device, Sample

# What a span looks like from outside.
Act = Literal["cpu", "gpu", "hung gpu", "disk", "bytes", "asleep", "compile", "stopped"]
Fault = Literal["stopped", "asleep", "deadlock", "live-lock"]
FAULTS: tuple[Fault, ...] = ("stopped", "asleep", "deadlock", "live-lock")
MICRO_BATCHES = (1, 2, 4, 32, 512)


@dataclass(frozen=True)
class Span:
    phase: str
    seconds: float
    act: Act = "cpu"
    step: int | None = None  # a step begins with it
    meets: bool = False  # it ends in a collective of all ranks
    marked: bool = True  # it begins with a mark; else the one before goes on in another way
    broken: bool = False  # here the fault is


@dataclass
class _Rank:
    program: Iterator[Span]
    marks: Marks = field(default_factory=lambda: Marks(0.0))
    span: Span = Span("start", 0.0)
    ends: float = 0.0
    waits: bool = False  # in the collective at the end of its span
    told_until: float = 0.0
    begun: int = 0  # collectives
    worked_s: float = 0.0
    wanted_s: float = 0.0
    io_bytes: float = 0.0
    ticks_s: float = 0.0
    over: bool = False


@dataclass(frozen=True)
class Trace:
    """How a run goes. `share` is what a thread gets of a core on its machine."""

    seed: int
    step_s: float
    micro_batches: int
    world: int
    gpu: bool
    share: float
    steps: int
    fault: Fault | None = None

    @property
    def tick_s(self) -> float:
        return min(1.0, max(0.2, self.step_s / 20))

    @property
    def about(self) -> str:
        where = "GPU" if self.gpu else "CPU"
        return (
            f"seed {self.seed}: {self.world} x {where}, {self.step_s:.3g} s a step, {self.micro_batches} micro-batches"
        )


def healthy(seed: int, least_s: float = 0.01, most_s: float = 1800.0) -> Trace:
    chance = random.Random(seed)
    step_s = math.exp(chance.uniform(math.log(least_s), math.log(most_s)))
    micro = chance.choice(MICRO_BATCHES)
    steps = 8 if step_s > 10 or micro > 100 else round(min(60, max(10, 40 / step_s)))
    share = chance.choice((1.0, 1.0, 0.5, 0.1, 0.02))
    return Trace(seed, step_s, micro, chance.choice((1, 2, 3)), chance.random() < 0.4, share, steps)


def broken(seed: int, fault: Fault, least_s: float = 0.01, most_s: float = 1800.0) -> Trace:
    trace = healthy(seed, least_s, most_s)
    return replace(trace, fault=fault, steps=max(8, trace.steps // 2))


def _program(trace: Trace, rank: int) -> Iterator[Span]:
    """Of one rank. What all ranks share (bursts, evaluations, compilations) comes from the seed alone."""
    shared, own = random.Random(trace.seed), random.Random(trace.seed * 1009 + rank)
    drift, evals, saves = shared.uniform(0.98, 1.05), shared.choice((0, 2, 3)), shared.choice((0, 1, 3))
    eval_s, save_s = trace.step_s * shared.uniform(0.5, 8.0), shared.uniform(0.0, 60.0)
    # One step in which a single piece of work takes far longer than any step before: other shapes, a throttled device.
    surge_step = shared.randrange(4, trace.steps)
    surge_s = min(max(200.0, 10 * trace.step_s), max(600.0, 4 * trace.step_s))
    yield Span("start", own.uniform(1, 20))
    yield Span("join", own.uniform(0, 30), "asleep", meets=True)
    yield Span("load", own.uniform(1, 60), "bytes")
    for step in range(trace.steps):
        scale = drift**step * shared.uniform(0.8, 1.25)
        if step == 0:
            scale *= shared.uniform(1, 6)
        elif step == 2:
            scale *= shared.uniform(1, 3)  # its traffic is counted
        burst = shared.random() < 0.25
        scale *= shared.uniform(2, max(2.0, min(20.0, 600 / trace.step_s))) if burst else 1.0
        compiles = step > 0 and shared.random() < 0.1
        more_s = surge_s if step == surge_step else 0.0
        yield from _step(trace, step, scale * trace.step_s, more_s, compiles, own)
        yield Span("record", 0.001)
        if evals and step % evals == 1:
            yield Span("evaluate", eval_s * own.uniform(0.9, 1.1), "gpu" if trace.gpu else "cpu", meets=True)
        slow_save = saves and step % saves == 0
        yield Span("save", save_s if slow_save else 0.001, own.choice(("disk", "bytes", "asleep")))  # type: ignore[arg-type]
    yield Span("finish", 5.0, meets=True)


def _step(trace: Trace, step: int, seconds: float, more_s: float, compiles: bool, own: random.Random) -> Iterator[Span]:
    data_s, data_act = seconds * own.uniform(0.0, 0.1), "cpu"
    if own.random() < 0.2:  # something holds the data up: a slow disk for long, a silent network for a while
        data_act = own.choice(("disk", "bytes", "asleep"))
        data_s = min(5.0, seconds) if data_act == "asleep" else own.uniform(1, 60)
    yield Span("data", data_s, data_act, step)  # type: ignore[arg-type]
    yield Span("exchange", 0.001, meets=True)
    one_s = seconds * own.uniform(0.7, 1.0) / trace.micro_batches
    if trace.gpu:  # the host runs ahead, and waits where it reads the loss
        for _ in range(trace.micro_batches):
            yield Span("forward", 0.02 * one_s)
            yield Span("backward", 0.03 * one_s)
        if compiles:
            yield Span("backward", own.uniform(5, 300), "compile", marked=False)
        yield Span("clip", 0.95 * seconds + more_s, "gpu", meets=True)
    else:
        for _ in range(trace.micro_batches):
            yield Span("forward", 0.35 * one_s)
            yield Span("backward", 0.65 * one_s)
        if compiles:
            yield Span("backward", own.uniform(5, 300), "compile", marked=False)
        if more_s:  # … and then it waits for something, for as long as is usual
            yield Span("backward", more_s, marked=False)
            yield Span("backward", 1.5 * trace.step_s, "asleep", marked=False)
        yield Span("backward", 0.001, meets=True, marked=False)
        yield Span("clip", 0.01 * seconds, meets=True)
    yield Span("optimizer", 0.05 * seconds, "gpu" if trace.gpu else "cpu")


FAULT_STEP = 5
_PLACES = ("data", "forward", "backward", "clip", "optimizer", "record", "save", "evaluate")


def _break(trace: Trace, program: Iterator[Span], chance: random.Random) -> Iterator[Span]:
    """The rank does half of a span, and then what its fault is, for ever. Where a rank may sleep for long without
    anybody being able to tell (a save), only a stop is put."""
    act: Act = {"stopped": "stopped", "live-lock": "cpu"}.get(trace.fault or "", "asleep")  # type: ignore[assignment]
    if trace.gpu and trace.fault == "deadlock":
        act = "hung gpu"  # a kernel that does not end; the host asks for ever whether it has
    places = _PLACES if trace.fault == "stopped" else _PLACES[:6]
    place, at_step = chance.choice(places), 0
    for span in program:
        at_step = at_step if span.step is None else span.step
        if (at_step >= FAULT_STEP and span.phase == place) or span.phase == "finish":
            yield replace(span, seconds=span.seconds / 2, meets=False)
            yield Span(span.phase, math.inf, act, marked=False, broken=True)
        yield span


class Group(Kernel):
    """The ranks of a trace, and what the watch sees of them at the present time."""

    def __init__(self, trace: Trace, programs: Sequence[Iterable[Span]] = ()) -> None:
        super().__init__()
        self.trace, self.now, self.broken_at = trace, 0.0, math.inf
        self.waited_for_at = math.inf  # since then all others wait for the broken one, and none of them compiles
        chance = random.Random(trace.seed + 7)
        self.victim = chance.randrange(trace.world) if trace.fault else None
        self._ranks = []
        for rank in range(trace.world):
            program = iter(programs[rank]) if programs else _program(trace, rank)
            breaks = rank == self.victim and not programs
            self._ranks.append(_Rank(_break(trace, program, chance) if breaks else program))
        self._arrived: dict[int, list[float]] = {}  # number of a collective → when each rank has come to it
        self.slowest_s = 0.0  # a step, or a stay in the phase of the fault

    @property
    def pids(self) -> dict[int, int]:
        return {rank: 1000 + rank for rank in range(self.trace.world)}

    @property
    def over(self) -> bool:
        return all(r.over for r in self._ranks)

    def advance(self, now: float) -> None:
        while sum(self._moves(r, now) for r in self._ranks):  # each of them has its turn
            pass
        for r in self._ranks:
            self._account(r, now)
        self.now = now
        others = [r for rank, r in enumerate(self._ranks) if rank != self.victim]
        if self.waited_for_at == math.inf and self.broken_at <= now and all(r.waits or r.over for r in others):
            self.waited_for_at = now
            beats = [x.marks.beat(0) for x in self._ranks]  # the others may have ended the step by now: it is measured
            phase = "start" if self.victim is None else self._ranks[self.victim].span.phase
            self.slowest_s = max(max(b.slowest_s, b.longest_s[phase]) for b in beats)

    def _moves(self, r: _Rank, now: float) -> bool:
        """Goes on from one span to the next, if it is time."""
        if r.over or (not r.waits and r.ends > now):
            return False
        at = r.ends
        if r.span.meets:
            if not r.waits:
                self._account(r, at)
                self._arrived.setdefault(r.begun, []).append(at)
                r.begun, r.waits = r.begun + 1, True
            come = self._arrived[r.begun - 1]
            if len(come) < len(self._ranks):
                return False
            at = max(come)
        self._account(r, at)
        r.waits = False
        span = next(r.program, None)
        if span is None:
            r.over = True
            return True
        if span.marked:
            r.marks.mark(span.phase, span.step, at)
        if span.broken:
            self.broken_at = at
        r.span, r.ends = span, at + span.seconds
        return True

    def _account(self, r: _Rank, until: float) -> None:
        seconds, r.told_until = until - r.told_until, until
        act: Act = "asleep" if r.waits or r.over else r.span.act
        spins = act == "hung gpu" or (self.trace.gpu and (r.waits or act == "gpu"))
        if act == "stopped":
            return
        works = act == "cpu"
        # Threads that wake up now and then use little of a core, but on a busy machine they wait for it.
        r.worked_s += seconds * (self.trace.share if works or spins else 0.003)
        r.wanted_s += seconds * (1.0 if works or spins or self.trace.share < 0.5 else 0.005)
        r.io_bytes += seconds * (1e5 if act == "bytes" else 100.0)
        r.ticks_s += seconds if act == "gpu" and not r.waits else 0.0

    # What the watch asks for

    def beat(self, rank: int) -> Beat:
        return self._ranks[rank].marks.beat(self.pids[rank])

    def sample(self, rank: int) -> Sample:
        r = self._ranks[rank]
        device = None
        if self.trace.gpu:
            device = Device(int(r.ticks_s), queued=r.waits or r.span.act in ("gpu", "hung gpu"))
        where = "torch/distributed/distributed_c10d.py:1 all_reduce" if r.waits else "shoal/model/block.py:1 forward"
        excuse = "compile" if r.span.act == "compile" else None
        return Sample(math.floor(self.now), (where,), excuse=excuse, groups={"all/0": r.begun}, device=device)

    def signs(self, rank: int, pid: int) -> Signs:
        r = self._ranks[rank]
        return Signs("T" if r.span.act == "stopped" else "S", int(r.io_bytes))

    def threads(self, rank: int, pid: int) -> Threads:
        r = self._ranks[rank]
        return Threads(r.worked_s, r.wanted_s, on_disk=r.span.act == "disk" and not r.waits)


@dataclass(frozen=True)
class Outcome:
    trace: Trace
    group: Group
    killed: Hang | None
    at: float  # virtual seconds
    slow: tuple[Hang, ...]  # told, and left alone

    @property
    def right(self) -> bool:
        return self.killed is not None and self.killed.rank == self.group.victim and self.at >= self.group.broken_at

    @property
    def after_s(self) -> float:
        """Since others wait for it: as long as they compile or compute themselves, nobody can know. One that is stopped
        is seen at once."""
        group = self.group
        return self.at - (group.broken_at if self.trace.fault == "stopped" else group.waited_for_at)

    @property
    def bar_s(self) -> float:
        """10 s, or 3 steps."""
        return max(10.0, 3 * self.group.slowest_s)


def play(trace: Trace, programs: Sequence[Iterable[Span]] = ()) -> Outcome:
    """To its end, or to its first rank that is taken for hung. A live-lock has as long as the others to be taken.
    `programs`: what the ranks do, instead of what the seed says."""
    group, gaps = Group(trace, programs), random.Random(trace.seed + 3)
    watch, slow, now = Watch(group.pids, group, kernel=group), list[Hang](), 0.0
    while not group.over:
        now += trace.tick_s
        if trace.fault is None and gaps.random() < 0.02:
            now += gaps.uniform(0, 10)  # the supervisor did not get to it
        group.advance(now)
        found = watch.verdict(now)
        if found is not None and not found.works:
            return Outcome(trace, group, found, now, tuple(slow))
        if found is not None and (not slow or slow[-1].marks != found.marks):
            slow.append(found)
        if now > group.waited_for_at + 2 * max(10.0, 3 * group.slowest_s) + 5:
            break
    return Outcome(trace, group, None, now, tuple(slow))
