"""Says when a group of workers stands still, and which of them the others wait for. Never imports torch.

`Watch` reads the pulses of one group (shoal.observe.pulse) and what the kernel tells about its processes. A rank makes
progress when it marks a phase or begins a collective. Time is counted in ticks of the watch, none longer than a second:
a machine that stood still as a whole (suspended, starved) has not made anybody hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.guard.signs import HERE, Kernel, Signs
from shoal.observe.pulse import LAZY_STEPS, Beat, Groups, Sample, read_beat, read_sample

QUICK_S = 7.0  # with the 10 s of the promise in mind: the rest is for looking and for asking for stacks
STEPS = 2.5  # … or so many of the slowest recent steps, with 3 in mind
LONG_S = 1800.0
BUSY = 4  # a rank that computes all the while gets so many times the limit: it may be slow, or in an endless loop
BUSY_SHARE = 0.2  # of a core
MOST_TICK_S = 1.0
STALE_S = 4.0  # a thread that writes every second and has not for so long cannot get at the interpreter
IO_BYTES = 4096
LOOK_S = 0.5  # without a mark, before more is looked at
# What takes as long as it takes. (An island that does not trade is left behind by the others, in its own time.)
LONG_PHASES = ("start", "join", "load", "trade", "evaluate", "save", "finish")
# A rank whose innermost Python frame is here waits for others, or for the device.
_WAITING = ("torch/distributed/", "torch/autograd/graph.py", "torch/cuda/")


@dataclass(frozen=True)
class Limits:
    """How long a rank may stand still."""

    quick_s: float = QUICK_S  # in a step, or `STEPS` steps if that is longer; stopped, in any phase
    long_s: float = LONG_S  # in phases that may take long, and while it compiles, downloads or waits for a disk


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

    @property
    def evidence(self) -> str:
        doing = "stopped" if self.stopped else "no progress"
        at = f" at {self.place}" if self.place else ""
        words = f"{doing} in {self.phase} of step {self.step} for {self.seconds:.0f} s{at}; {self.why}"
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
    then: Signs | None = None  # soon after it
    now: Signs = field(default_factory=Signs)
    stopped_at: float | None = None
    moved_bytes_at: float | None = None  # when it last read or wrote something
    on_disk_at: float | None = None

    @property
    def marks(self) -> int:
        return -1 if self.beat is None else self.beat.marks

    @property
    def phase(self) -> str:
        return "start" if self.beat is None else self.beat.phase

    @property
    def in_lazy_steps(self) -> bool:
        return self.beat is None or self.beat.steps <= LAZY_STEPS


class Watch:
    """Of one group. `verdict` is to be asked a few times a second."""

    def __init__(
        self, pids: Mapping[int, int], folder: Path, limits: Limits | None = None, kernel: Kernel = HERE
    ) -> None:
        self._folder, self._limits, self._kernel = folder, limits or Limits(), kernel
        self._ranks = {rank: _Rank(pid) for rank, pid in pids.items()}
        self._clock, self._asked_at = 0.0, None if not pids else -1.0

    @property
    def beats(self) -> dict[int, Beat]:
        return {rank: r.beat for rank, r in self._ranks.items() if r.beat is not None}

    def verdict(self, now: float) -> Hang | None:
        """`now` is monotonic. The same hang is told again until it is over."""
        if self._asked_at is not None and self._asked_at >= 0:
            self._clock += min(max(0.0, now - self._asked_at), MOST_TICK_S)
        self._asked_at = now
        for rank, r in self._ranks.items():
            self._look(rank, r)
        found = self._stopped() or self._behind(now)
        return None if found is None else self._hang(*found)

    def _look(self, rank: int, r: _Rank) -> None:
        beat = read_beat(self._folder, rank)
        if beat is not None and beat.pid == r.pid and beat.marks != r.marks:
            r.beat = beat
            self._progressed(r)
        r.now = self._kernel.signs(rank, r.pid)
        r.stopped_at = (r.stopped_at if r.stopped_at is not None else self._clock) if r.now.stopped else None
        if r.then is None:
            r.then = r.now
        if r.now.io_bytes > r.then.io_bytes + IO_BYTES:
            r.moved_bytes_at, r.then = self._clock, replace(r.then, io_bytes=r.now.io_bytes)
        if self._silent_s(r) < LOOK_S:
            return
        sample = read_sample(self._folder, rank)
        if sample is not None:
            if r.groups is not None and sample.groups != r.groups:
                self._progressed(r)
            r.sample, r.groups = sample, sample.groups
        if self._kernel.waits_for_disk(rank, r.pid):
            r.on_disk_at = self._clock

    def _progressed(self, r: _Rank) -> None:
        r.at, r.then, r.groups, r.moved_bytes_at, r.on_disk_at = self._clock, None, None, None, None

    def _silent_s(self, r: _Rank) -> float:
        return self._clock - r.at

    def _stopped(self) -> tuple[int, str] | None:
        """A process that has been stopped is a fact, whatever it was doing."""
        stopped = [
            (r.marks, rank)
            for rank, r in self._ranks.items()
            if r.stopped_at is not None and self._clock - r.stopped_at >= self._limits.quick_s
        ]
        if not stopped:
            return None
        rank = min(stopped)[1]
        return rank, f"its process (pid {self._ranks[rank].pid}) is in state {self._ranks[rank].now.state}"

    def _behind(self, now: float) -> tuple[int, str] | None:
        """The rank that is behind, when it has stood still for longer than it may and nobody else moves."""
        quick_s = self._limits.quick_s
        if not self._ranks or min(map(self._silent_s, self._ranks.values())) < quick_s / 2:
            return None
        rank, why = suspect(self._ranks, now)
        r = self._ranks[rank]
        return (rank, why) if self._silent_s(r) >= self._limit_s(r) else None

    def _limit_s(self, r: _Rank) -> float:
        limits, silent_s = self._limits, self._silent_s(r)
        if r.in_lazy_steps or r.phase in LONG_PHASES or (r.sample is not None and r.sample.excuse):
            return limits.long_s
        lately = max(0.0, self._clock - limits.quick_s)
        if any(at is not None and at >= lately for at in (r.moved_bytes_at, r.on_disk_at)):
            return limits.long_s  # a slow disk
        step_s = max((x.beat.slowest_s for x in self._ranks.values() if x.beat is not None), default=0.0)
        limit_s = max(limits.quick_s, STEPS * step_s)
        busy = r.then is not None and r.now.cpu_s - r.then.cpu_s > BUSY_SHARE * silent_s
        return limit_s * BUSY if busy else limit_s

    def _hang(self, rank: int, why: str) -> Hang:
        r = self._ranks[rank]
        sample = read_sample(self._folder, rank) or r.sample or Sample(0.0)
        others = tuple(
            Other(other, o.phase, waiting_in(o.sample)) for other, o in sorted(self._ranks.items()) if other != rank
        )
        return Hang(
            rank=rank,
            pid=r.pid,
            step=0 if r.beat is None else r.beat.step + 1,
            phase=r.phase,
            seconds=self._silent_s(r),
            stopped=r.now.stopped,
            why=why,
            stack=sample.stack,
            reader=sample.reader if r.phase == "data" else (),
            others=others,
        )


def suspect(ranks: Mapping[int, _Rank], now: float) -> tuple[int, str]:
    """The rank that the others wait for, and what shows it. Asked when all stand still."""
    if len(ranks) == 1:
        return next(iter(ranks)), "it is the only one"
    fewest = min(r.marks for r in ranks.values())
    left = [rank for rank, r in ranks.items() if r.marks == fewest]
    if len(left) == 1:
        return left[0], "it has made less progress than all others"
    waited_for = _waited_for(ranks)
    if behind := [rank for rank in left if rank in waited_for]:
        group, number = waited_for[behind[0]]
        return behind[0], f"it has not begun collective {number} of {group}, where another waits"
    if stale := [rank for rank in left if _stale(ranks[rank], now)]:
        return stale[0], "no other thread of it can run"
    if elsewhere := [rank for rank in left if not _waits(ranks[rank].sample)]:
        return elsewhere[0], "it is in no collective"
    return left[0], "all ranks wait at the same place, none is behind: look at the network between them"


def _waited_for(ranks: Mapping[int, _Rank]) -> dict[int, tuple[str, int]]:
    """Ranks that others wait for and that wait for nobody: (group, the collective that they have not begun)."""
    groups = {rank: dict(r.sample.groups) if r.sample else {} for rank, r in ranks.items()}
    found: dict[int, tuple[str, int]] = {}
    for rank, mine in groups.items():
        theirs = [g for other, g in groups.items() if other != rank]
        if any(mine[name] > g[name] for g in theirs for name in g if name in mine):
            continue  # it waits itself
        ahead = [(g[name], name) for g in theirs for name in g if name in mine and g[name] > mine[name]]
        if ahead:
            number, name = max(ahead)
            found[rank] = (f"group {name.split('/')[0]}", number)
    return found


def _stale(r: _Rank, now: float) -> bool:
    return r.sample is not None and now - r.sample.t > STALE_S


def _waits(sample: Sample | None) -> bool:
    return sample is None or not sample.stack or sample.stack[0].startswith(_WAITING)


def waiting_in(sample: Sample | None) -> str:
    """The call that a rank waits in: of the torch function nearest to our code, and our line."""
    if sample is None or not sample.stack:
        return ""
    ours = next((i for i, frame in enumerate(sample.stack) if frame.startswith("shoal/")), None)
    if ours is None:
        return sample.stack[0]
    called = _functions(reversed(sample.stack[:ours]))
    return f"{called} at {_line(sample.stack[ours])}" if called else _line(sample.stack[ours])


def _functions(frames: Iterable[str]) -> str:
    return next((name for f in frames if (name := f.rsplit(" ", 1)[1]) not in ("wrapper", "_fn", "inner")), "")


def _line(frame: str) -> str:
    return frame.rsplit(" ", 1)[0]
