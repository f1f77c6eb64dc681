"""What a watch knows of the ranks of a group, column by column: a look costs by how many ranks have news, not by how
many there are. Never imports torch.

Ranks of this machine are asked at each look. Those of other nodes have news when their agent has sent some, which for
thousands of ranks is once a second; in between only the clock goes on, and that is arithmetic over columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.guard.signs import Kernel, Threads
from shoal.guard.suspect import may_spin
from shoal.journal.beat import Beat
from shoal.journal.pulse_file import Sample

IO_BYTES = 4096
UNHEARD_S = 3.0  # of a rank on another machine, before its time no longer counts
# What takes as long as it takes, and says nothing about the next time: most saves only copy, some wait for a disk.
# (An island that does not trade is left behind by the others, in its own time.)
LONG_PHASES = ("start", "join", "load", "trade", "save", "finish")
MOVES_BYTES = (*LONG_PHASES, "data", "record", "evaluate")  # where reading and writing is what it is there for
WAITS = ("exchange", "trade")  # for others; what it computes meanwhile is not what they wait for
NEVER = np.nan


class Pulses(Protocol):
    """What the ranks of a group tell of themselves."""

    def beat(self, rank: int) -> Beat | None: ...
    def sample(self, rank: int) -> Sample | None: ...


class Ranks:
    """In the order of `ranks`; `i` is a position in it. Times are on the watch's clock, unless they say otherwise."""

    def __init__(self, pids: Mapping[int, int], pulses: Pulses, kernel: Kernel, look_s: float, window_s: float) -> None:
        self.ranks, self.pids = list(pids), list(pids.values())
        self._at_of = {rank: i for i, rank in enumerate(self.ranks)}
        self._pulses, self._kernel, self._look_s, self._window_s = pulses, kernel, look_s, window_s
        n = len(self.ranks)
        self.beats: list[Beat | None] = [None] * n
        self.samples: list[Sample | None] = [None] * n
        self.sampled = set[int]()  # of whom there is another sample, since somebody has emptied this
        self._last: list[Sample | None] = [None] * n  # with groups, since its last progress
        self.marks = np.full(n, -1, dtype=np.int64)
        self.at = np.zeros(n)  # of its last progress
        self.worked_at = np.full(n, NEVER)  # since then, it or its device
        self.measured = np.zeros(n, dtype=bool)  # whether a window has passed since then
        self.stopped = np.zeros(n, dtype=bool)
        self.stopped_at = np.full(n, NEVER)
        self.busy_disk_at = np.full(n, NEVER)  # when it last read or wrote something, or waited for a disk
        self._states = [""] * n  # of its process, as the kernel names them
        self._looked = np.zeros(n, dtype=bool)  # at more than its marks, since its last progress
        self._io_bytes = [-1] * n  # -1: not known
        self._ticks = [-1] * n  # of its device
        self._threads: list[Threads | None] = [None] * n  # when its present window began
        self._since = np.full(n, NEVER)  # when that was, by the machine's clock
        self._moved = np.zeros(n, dtype=bool)  # whether they have been heard to do something since then
        self._on_disk = np.zeros(n, dtype=bool)

    def look(self, clock: float, tick_s: float, now: float) -> None:
        """`now` is of the machine's clock, and `tick_s` what has passed on the watch's since the last look."""
        for rank in self._kernel.unheard(now, UNHEARD_S):
            if (i := self._at_of.get(rank)) is not None:
                self._not_seen(i, tick_s)
        fresh = self._fresh()
        for i in fresh:
            self._look_at_marks(i, clock)
        due = clock - self.at >= self._look_s
        news = np.zeros(len(self.ranks), dtype=bool)
        news[fresh] = True
        over = now - self._since >= self._window_s
        for i in np.flatnonzero(due & (news | ~self._looked | (over & self._moved))).tolist():
            self._look_closer(i, clock, now)
        # All others do what they did when they were last heard of.
        self.busy_disk_at[due & self._on_disk] = clock
        over = due & (now - self._since >= self._window_s)
        self._since[over], self.measured[over] = now, True

    def phase(self, i: int) -> str:
        beat = self.beats[i]
        return "start" if beat is None else beat.phase

    def silent_s(self, clock: float) -> NDArray[np.float64]:
        """Without a mark or a collective."""
        silent: NDArray[np.float64] = clock - self.at
        return silent

    def idle_s(self, clock: float) -> NDArray[np.float64]:
        """… and without work."""
        return clock - np.where(np.isnan(self.worked_at), self.at, self.worked_at)

    def works(self, clock: float, within_s: float) -> NDArray[np.bool_]:
        return (clock - self.worked_at < within_s) & ~self.stopped

    def _fresh(self) -> list[int]:
        """Of whom there may be something new."""
        told: Iterable[int] | None = self._kernel.fresh()
        return list(range(len(self.ranks))) if told is None else [i for r in told if (i := self._at_of.get(r, -1)) >= 0]

    def _not_seen(self, i: int, seconds: float) -> None:
        """For so long nothing was known of it: its clocks stand still."""
        self.at[i] += seconds
        self.worked_at[i] += seconds
        self.stopped_at[i] += seconds

    def _progressed(self, i: int, clock: float) -> None:
        self.at[i], self.measured[i], self._looked[i] = clock, False, False
        self._on_disk[i] = self._moved[i] = False
        self.worked_at[i] = self.busy_disk_at[i] = self._since[i] = NEVER
        self._io_bytes[i] = self._ticks[i] = -1
        self._last[i] = self._threads[i] = None

    def _look_at_marks(self, i: int, clock: float) -> None:
        rank, pid, last = self.ranks[i], self.pids[i], self.beats[i]
        beat = self._pulses.beat(rank)
        if beat is not last and beat is not None and beat.pid == pid and (last is None or _news(beat, last)):
            self.beats[i], self.marks[i] = beat, beat.marks
            self._progressed(i, clock)
        signs = self._kernel.signs(rank, pid)
        if signs.state != self._states[i]:
            self._states[i], stopped = signs.state, signs.stopped
            if stopped != self.stopped[i]:
                self.stopped[i], self.stopped_at[i] = stopped, clock if stopped else NEVER

    def _look_closer(self, i: int, clock: float, now: float) -> None:
        rank, pid, sample = self.ranks[i], self.pids[i], self._pulses.sample(self.ranks[i])
        if sample is not None and (sample is not self.samples[i] or not self._looked[i]):
            if (last := self._last[i]) is None:
                self._last[i] = sample  # as it is: one that makes progress is never asked for its groups
            elif groups := sample.groups:
                before = last.groups
                if before and groups is not before and groups != before:
                    self._progressed(i, clock)
                self._last[i] = sample
            self.samples[i] = sample
            self.sampled.add(i)
        self._looked[i] = True
        io_bytes = self._kernel.signs(rank, pid).io_bytes
        if self._io_bytes[i] < 0:
            self._io_bytes[i] = io_bytes
        elif io_bytes > self._io_bytes[i] + IO_BYTES and self.phase(i) in MOVES_BYTES:
            self.busy_disk_at[i], self._io_bytes[i] = clock, io_bytes
        self._look_at_work(i, self._kernel.threads(rank, pid), clock, now)

    def _look_at_work(self, i: int, threads: Threads, clock: float, now: float) -> None:
        self._on_disk[i] = threads.on_disk
        sample = self.samples[i]
        device = sample.device if sample else None
        if device is not None:
            if 0 <= self._ticks[i] < device.ticks:
                self.worked_at[i] = clock
            self._ticks[i] = device.ticks
        before = self._threads[i]
        if before is None:
            self._threads[i], self._since[i] = threads, now
            return
        passed_s = now - float(self._since[i])
        if passed_s < self._window_s:
            self._moved[i] = threads.worked_s != before.worked_s or threads.wanted_s != before.wanted_s
            return
        self._threads[i], self._since[i], self.measured[i], self._moved[i] = threads, now, True, False
        # While the device has work that it does not get done, the host may spin in a wait for it.
        if self.phase(i) in WAITS or (device is not None and device.queued) or may_spin(sample):
            return
        if threads.at_work_since(before, passed_s):
            self.worked_at[i] = clock


def _news(beat: Beat, last: Beat) -> bool:
    """What only some ranks of a script do (a save) is another phase, and no mark that counts."""
    return beat.marks != last.marks or beat.phase != last.phase
