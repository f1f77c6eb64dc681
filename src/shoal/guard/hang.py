"""Says when a group of workers stands still, and which of them the others wait for. Never imports torch.

`Watch` reads the pulses of one group (shoal.observe.pulse) and what the kernel tells about its processes. A rank makes
progress when it marks a phase or begins a collective. One that computes meanwhile, or whose device does, is at work:
it is slow, or in a live-lock, and nobody can tell which from outside; `Hang.works` says so. Time is counted in ticks of
the watch, none longer than a second: a machine that stood still as a whole (suspended, starved) has not made anybody
hang. Nor does time count in which nothing was heard of a rank on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shoal.guard.signs import Kernel, Signs, Threads
from shoal.guard.suspect import may_spin, suspects, waiting_in
from shoal.observe.beat import Beat
from shoal.observe.pulse import Groups, Sample

QUICK_S = 7.0  # with the 10 s of the promise in mind: the rest is for looking and for asking for stacks
STEPS = 2.5  # … or so many of the slowest recent steps, or of the longest recent stays in the phase, with 3 in mind
LONG_S = 1800.0
MOST_TICK_S = 1.0
LOOK_S = 0.5  # without a mark, before more is looked at
WINDOW_S = 1.0  # over which a rank's work is measured
IO_BYTES = 4096
UNHEARD_S = 3.0  # of a rank on another machine, before its time no longer counts
# What takes as long as it takes, and says nothing about the next time: most saves only copy, some wait for a disk.
# (An island that does not trade is left behind by the others, in its own time.)
LONG_PHASES = ("start", "join", "load", "trade", "save", "finish")
MOVES_BYTES = (*LONG_PHASES, "data", "record", "evaluate")  # where reading and writing is what it is there for
WAITS = ("exchange", "trade")  # for others; what it computes meanwhile is not what they wait for


@dataclass(frozen=True)
class Limits:
    """How long a rank may stand still."""

    quick_s: float = QUICK_S  # in a step, or `STEPS` steps if that is longer; stopped, in any phase
    long_s: float = LONG_S  # in phases that may take long, until a step was measured, while it compiles or downloads


class Pulses(Protocol):
    """What the ranks of a group tell of themselves."""

    def beat(self, rank: int) -> Beat | None: ...
    def sample(self, rank: int) -> Sample | None: ...


@dataclass(frozen=True)
class Other:
    """A rank that waits."""

    rank: int
    phase: str
    where: str  # the call it waits in, as far as Python knows

    def __str__(self) -> str:
        return f"rank {self.rank} waits in {self.phase}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Hang:
    """One rank that the others wait for."""

    rank: int
    pid: int
    step: int  # counted from 1, as in the journal
    phase: str
    seconds: float  # without progress
    stopped: bool
    why: str  # what makes it the one
    stack: tuple[str, ...]  # innermost first
    reader: tuple[str, ...]  # of the thread that reads its data, if that is what it waits for
    others: tuple[Other, ...] = ()
    works: bool = False  # it, or its device, computes: slow, or a live-lock
    marks: int = 0  # that it has made

    @property
    def evidence(self) -> str:
        doing = "stopped" if self.stopped else "at work without progress" if self.works else "no progress"
        at = f" at {self.place}" if self.place else ""
        slow = "; slow, or a live-lock" if self.works else ""
        words = f"{doing} in {self.phase} of step {self.step} for {self.seconds:.0f} s{at}; {self.why}{slow}"
        if self.others:
            shown = "; ".join(map(str, self.others[:2]))
            more = f" and {len(self.others) - 2} more" if len(self.others) > 2 else ""
            words += f"; {shown}{more}"
        return words

    @property
    def place(self) -> str:
        """Where it is, in one frame: the innermost one of the thread that does the work."""
        return next(iter(self.reader or self.stack), "")


@dataclass
class _Rank:
    pid: int
    beat: Beat | None = None
    sample: Sample | None = None
    groups: Groups | None = None  # as they stood when it was last looked at
    at: float = 0.0  # of its last progress, on the watch's clock
    worked_at: float | None = None  # since then, it or its device
    now: Signs = field(default_factory=Signs)
    io_bytes: int | None = None
    threads: tuple[float, Threads] | None = None  # when its present window began, and what they had done until then
    measured: bool = False  # whether a window has passed
    ticks: int | None = None  # of its device
    stopped_at: float | None = None
    busy_disk_at: float | None = None  # when it last read or wrote something, or waited for a disk

    @property
    def marks(self) -> int:
        return -1 if self.beat is None else self.beat.marks

    @property
    def phase(self) -> str:
        return "start" if self.beat is None else self.beat.phase

    def progressed(self, clock: float) -> None:
        self.at, self.measured = clock, False
        self.worked_at = self.io_bytes = self.threads = self.groups = self.ticks = self.busy_disk_at = None

    def not_seen(self, seconds: float) -> None:
        """For so long nothing was known of it: its clocks stand still."""
        self.at += seconds
        self.worked_at = None if self.worked_at is None else self.worked_at + seconds
        self.stopped_at = None if self.stopped_at is None else self.stopped_at + seconds


class Watch:
    """Of one group. `verdict` is to be asked a few times a second."""

    def __init__(
        self, pids: Mapping[int, int], pulses: Pulses, limits: Limits | None = None, kernel: Kernel | None = None
    ) -> None:
        self._pulses, self._limits, self._kernel = pulses, limits or Limits(), kernel or Kernel()
        self._ranks = {rank: _Rank(pid) for rank, pid in pids.items()}
        self._look_s, self._window_s = min(LOOK_S, self._limits.quick_s / 8), min(WINDOW_S, self._limits.quick_s / 4)
        self._clock, self._asked_at = 0.0, -1.0

    @property
    def beats(self) -> dict[int, Beat]:
        return {rank: r.beat for rank, r in self._ranks.items() if r.beat is not None}

    def verdict(self, now: float) -> Hang | None:
        """`now` is monotonic. The same hang is told again until it is over."""
        tick_s = 0.0
        if self._asked_at >= 0:
            tick_s = min(max(0.0, now - self._asked_at), MOST_TICK_S)
        self._clock, self._asked_at = self._clock + tick_s, now
        for rank, r in self._ranks.items():
            if self._kernel.unheard_s(rank, now) > UNHEARD_S:
                r.not_seen(tick_s)
            self._look(rank, r, now)
        return self._stopped() or self._behind(now)

    def _look(self, rank: int, r: _Rank, now: float) -> None:
        beat = self._pulses.beat(rank)
        if beat is not None and beat.pid == r.pid and beat.marks != r.marks:
            r.beat = beat
            r.progressed(self._clock)
        r.now = self._kernel.signs(rank, r.pid)
        r.stopped_at = (r.stopped_at if r.stopped_at is not None else self._clock) if r.now.stopped else None
        if self._silent_s(r) < self._look_s:
            return
        sample = self._pulses.sample(rank)
        if sample is not None:
            if r.groups and sample.groups and sample.groups != r.groups:
                r.progressed(self._clock)
            r.sample, r.groups = sample, sample.groups or r.groups
        self._look_at_disk(r)
        self._look_at_work(r, self._kernel.threads(rank, r.pid), now)

    def _look_at_disk(self, r: _Rank) -> None:
        if r.io_bytes is None:
            r.io_bytes = r.now.io_bytes
        elif r.phase in MOVES_BYTES and r.now.io_bytes > r.io_bytes + IO_BYTES:
            r.busy_disk_at, r.io_bytes = self._clock, r.now.io_bytes

    def _look_at_work(self, r: _Rank, threads: Threads, now: float) -> None:
        if threads.on_disk:
            r.busy_disk_at = self._clock
        device = r.sample.device if r.sample else None
        if device is not None:
            if r.ticks is not None and device.ticks > r.ticks:
                r.worked_at = self._clock
            r.ticks = device.ticks
        if r.threads is None:
            r.threads = now, threads
            return
        since, before = r.threads
        if now - since < self._window_s:
            return
        r.threads, r.measured = (now, threads), True
        # While the device has work that it does not get done, the host may spin in a wait for it.
        if r.phase in WAITS or (device is not None and device.queued) or may_spin(r.sample):
            return
        if threads.at_work_since(before, now - since):
            r.worked_at = self._clock

    def _silent_s(self, r: _Rank) -> float:
        """Without a mark or a collective."""
        return self._clock - r.at

    def _idle_s(self, r: _Rank) -> float:
        """… and without work."""
        return self._clock - (r.at if r.worked_at is None else r.worked_at)

    def _stopped(self) -> Hang | None:
        """A process that has been stopped is a fact, whatever it was doing."""
        stopped = [
            (r.marks, rank)
            for rank, r in self._ranks.items()
            if r.stopped_at is not None and self._clock - r.stopped_at >= self._limits.quick_s
        ]
        if not stopped:
            return None
        rank = min(stopped)[1]
        r = self._ranks[rank]
        return self._hang(rank, f"its process (pid {r.pid}) is in state {r.now.state}")

    def _behind(self, now: float) -> Hang | None:
        """The rank that is behind, when it has stood still for longer than it may and nobody else moves."""
        if not self._ranks or min(map(self._silent_s, self._ranks.values())) < self._limits.quick_s / 2:
            return None
        found = suspects(self._ranks, now)
        among = {rank: self._ranks[rank] for rank in found.among}
        limits_s = self._limits_s(among)
        if slow := [rank for rank, r in among.items() if self._works(r)]:
            over = self._silent_s(among[slow[0]]) >= limits_s[slow[0]]
            return self._hang(slow[0], found.why, works=True) if over else None
        over = all(r.measured and self._idle_s(r) >= limits_s[rank] for rank, r in among.items())
        return self._hang(found.rank, found.why) if over else None

    def _works(self, r: _Rank) -> bool:
        return r.worked_at is not None and self._clock - r.worked_at < self._limits.quick_s and not r.now.stopped

    def _limits_s(self, ranks: Mapping[int, _Rank]) -> dict[int, float]:
        """By the slowest recent step and stay in the phase, of all ranks; long, until both have been measured."""
        beats = self.beats.values()
        step_s = max((b.slowest_s for b in beats), default=0.0)
        stays_s = {phase: max((b.longest_s[phase] for b in beats), default=0.0) for phase in _phases(ranks)}
        return {rank: self._limit_s(r, step_s, stays_s[r.phase]) for rank, r in ranks.items()}

    def _limit_s(self, r: _Rank, step_s: float, stay_s: float) -> float:
        limits = self._limits
        if not step_s or not stay_s or r.phase in LONG_PHASES or (r.sample is not None and r.sample.excuse):
            return limits.long_s
        if r.busy_disk_at is not None and self._clock - r.busy_disk_at < limits.quick_s:
            return limits.long_s  # a slow disk
        return max(limits.quick_s, STEPS * step_s, STEPS * stay_s)

    def _hang(self, rank: int, why: str, works: bool = False) -> Hang:
        r = self._ranks[rank]
        sample = self._pulses.sample(rank) or r.sample or Sample(0.0)
        others = tuple(
            Other(other, o.phase, waiting_in(o.sample)) for other, o in sorted(self._ranks.items()) if other != rank
        )
        seconds = self._silent_s(r) if works else self._idle_s(r)
        if r.stopped_at is not None:
            seconds = self._clock - r.stopped_at
        return Hang(
            rank=rank,
            pid=r.pid,
            step=0 if r.beat is None else r.beat.step + 1,
            phase=r.phase,
            seconds=seconds,
            stopped=r.now.stopped,
            why=why,
            stack=sample.stack,
            reader=sample.reader if r.phase == "data" else (),
            others=others,
            works=works,
            marks=r.marks,
        )


def _phases(ranks: Mapping[int, _Rank]) -> set[str]:
    return {r.phase for r in ranks.values()}
