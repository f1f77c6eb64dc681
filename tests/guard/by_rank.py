"""The watch as it was before it looked at columns: rank by rank. Slow and plain; the real one is compared with it
(test_hang_columns.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.guard import suspect
from shoal.guard.hang import LOOK_S, MOST_OTHERS, MOST_TICK_S, STEPS, WINDOW_S, Hang, Limits, Other
from shoal.guard.ranks import IO_BYTES, LONG_PHASES, MOVES_BYTES, UNHEARD_S, WAITS, Pulses
from shoal.guard.signs import Kernel, Signs, Threads
from shoal.guard.suspect import may_spin, waiting_in
from shoal.journal.beat import Beat
from shoal.journal.pulse_file import Groups, Sample


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


class WatchByRank:
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
        unheard = set(self._kernel.unheard(now, UNHEARD_S))
        for rank, r in self._ranks.items():
            if rank in unheard:
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
        found = _suspects(self._ranks, now)
        among = {rank: self._ranks[rank] for rank in found.among}
        limits_s = self._limits_s(among)
        if slow := [rank for rank, r in among.items() if self._works(r)]:
            over = self._silent_s(among[slow[0]]) >= limits_s[slow[0]]
            return self._hang(slow[0], found.why, works=True) if over else None
        over = all(r.measured and self._idle_s(r) >= limits_s[rank] for rank, r in among.items())
        return self._hang(found.one, found.why) if over else None

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
            others=others[:MOST_OTHERS],
            waiting=len(others),
            works=works,
            marks=r.marks,
        )


@dataclass(frozen=True)
class Suspects:
    one: int
    among: tuple[int, ...]
    why: str


def _phases(ranks: Mapping[int, _Rank]) -> set[str]:
    return {r.phase for r in ranks.values()}


def _suspects(ranks: Mapping[int, _Rank], now: float) -> Suspects:
    if len(ranks) == 1:
        rank = next(iter(ranks))
        return Suspects(rank, (rank,), "it is the only one")
    fewest = min(r.marks for r in ranks.values())
    left = tuple(rank for rank, r in ranks.items() if r.marks == fewest)
    if len(left) == 1:
        return Suspects(left[0], left, "it has made less progress than all others")
    waited_for = _waited_for(ranks)
    if behind := tuple(rank for rank in left if rank in waited_for):
        group, number = waited_for[behind[0]]
        return Suspects(behind[0], behind, f"it has not begun collective {number} of {group}, where another waits")
    # From here on it is a guess who of them it is.
    if stale := [rank for rank in left if suspect._stale(ranks[rank].sample, now)]:
        return Suspects(stale[0], left, "no other thread of it can run")
    if elsewhere := [rank for rank in left if not suspect._is_in(ranks[rank].sample, suspect._WAITING, unknown=True)]:
        return Suspects(elsewhere[0], left, "it is in no collective")
    return Suspects(left[0], left, "all ranks wait at the same place, none is behind: look at the network between them")


def _waited_for(ranks: Mapping[int, _Rank]) -> dict[int, tuple[str, int]]:
    """Ranks that others wait for and that wait for nobody: (group, the collective that they have not begun)."""
    groups = {rank: r.sample.groups if r.sample else {} for rank, r in ranks.items()}
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for mine in groups.values():
        for name, begun in mine.items():
            least[name] = min(begun, least.get(name, begun))
            most[name] = max(begun, most.get(name, begun))
    found: dict[int, tuple[str, int]] = {}
    for rank, mine in groups.items():
        if any(begun > least[name] for name, begun in mine.items()):
            continue  # it waits itself
        if ahead := [(most[name], name) for name, begun in mine.items() if most[name] > begun]:
            number, name = max(ahead)
            found[rank] = (f"group {name.split('/')[0]}", number)
    return found
