"""Says when a group of workers stands still, and which of them the others wait for. Never imports torch.

`Watch` reads the pulses of one group (shoal.journal.pulse) and what the kernel tells about its processes. A rank makes
progress when it marks a phase or begins a collective. One that computes meanwhile, or whose device does, is at work:
it is slow, or in a live-lock, and nobody can tell which from outside; `Hang.works` says so. Time is counted in ticks of
the watch, none longer than a second: a machine that stood still as a whole (suspended, starved) has not made anybody
hang. Nor does time count in which nothing was heard of a rank on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.guard.ranks import LONG_PHASES, Pulses, Ranks
from shoal.guard.signs import Kernel
from shoal.guard.suspect import WaitedFor, named, suspects, waited_for, waiting_in
from shoal.journal.beat import Beat
from shoal.journal.pulse_file import Groups, Sample
from shoal.spec.duration import seconds

QUICK_S = 7.0  # with the 10 s of the promise in mind: the rest is for looking and for asking for stacks
# Between nodes a link may be away for a moment, and NCCL tries again by itself: over InfiniBand 7 times, 4.3 s each
# (NCCL_IB_RETRY_CNT 7, NCCL_IB_TIMEOUT 20: 4.096 µs x 2^20). Whoever ends the run before that makes a flap a restart.
NODES_S = 45.0
STEPS = 2.5  # … or so many of the slowest recent steps, or of the longest recent stays in the phase, with 3 in mind
LONG_S = 1800.0
BETWEEN_S = 60.0  # of somebody's script, between its steps
MOST_TICK_S = 1.0
LOOK_S = 0.5  # without a mark, before more is looked at
WINDOW_S = 1.0  # over which a rank's work is measured
MOST_OTHERS = 64  # that are told of with whom they wait for


@dataclass(frozen=True)
class Limits:
    """How long a rank may stand still."""

    quick_s: float = QUICK_S  # in a step, or `STEPS` steps if that is longer
    long_s: float = LONG_S  # in phases that may take long, until a step was measured, while it compiles or downloads
    stopped_s: float | None = None  # by a signal, in any phase; None: as `quick_s`
    least_s: Mapping[str, float] = field(
        default_factory=dict
    )  # in phases of a step that may take longer than `quick_s`

    @staticmethod
    def of(patience: str, nodes: int = 1) -> Limits:
        """`patience` is guard.hang."""
        if patience not in ("auto", "off"):
            return Limits(seconds(patience))
        return Limits() if nodes <= 1 else Limits(NODES_S, stopped_s=QUICK_S)

    @staticmethod
    def of_script(patience: str) -> Limits:
        """Nobody knows what it does between its steps: it may upload a file, or wait for a loader's processes."""
        return Limits.of(patience) if patience not in ("auto", "off") else Limits(least_s={"forward": BETWEEN_S})


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
    others: tuple[Other, ...] = ()  # who wait, the first of them
    waiting: int = 0  # how many they are
    works: bool = False  # it, or its device, computes: slow, or a live-lock
    marks: int = 0  # that it has made
    nccl: str = ""  # who had not come to which collective, by NCCL's flight recorder
    signs: str = ""  # what shows it, where nothing is known of phases and steps

    @property
    def evidence(self) -> str:
        doing = "stopped" if self.stopped else "at work without progress" if self.works else "no progress"
        at = f" at {self.place}" if self.place else ""
        slow = "; slow, or a live-lock" if self.works else ""
        where = "" if self.signs else f" in {self.phase} of step {self.step}"
        words = f"{self.signs or doing}{where} for {self.seconds:.0f} s{at}; {self.why}{slow}"
        if self.others:
            shown = "; ".join(map(str, self.others[:2]))
            more = f" and {self.waiting - 2} more" if self.waiting > 2 else ""
            words += f"; {shown}{more}"
        return f"{words}; NCCL: {self.nccl}" if self.nccl else words

    @property
    def place(self) -> str:
        """Where it is, in one frame: the innermost one of the thread that does the work."""
        return next(iter(self.reader or self.stack), "")


class Watch:
    """Of one group. `verdict` is to be asked a few times a second."""

    def __init__(
        self, pids: Mapping[int, int], pulses: Pulses, limits: Limits | None = None, kernel: Kernel | None = None
    ) -> None:
        self._pulses, self._limits = pulses, limits or Limits()
        quick_s = self._limits.quick_s
        self._kernel = kernel or Kernel()
        self._all = Ranks(pids, pulses, self._kernel, min(LOOK_S, quick_s / 8), min(WINDOW_S, quick_s / 4))
        self._waited_for: WaitedFor = {}
        self._groups: list[Groups] = [{} for _ in pids]  # that it was made of
        self._clock, self._asked_at = 0.0, -1.0

    @property
    def beats(self) -> dict[int, Beat]:
        return {rank: b for rank, b in zip(self._all.ranks, self._all.beats, strict=True) if b is not None}

    def verdict(self, now: float) -> Hang | None:
        """`now` is monotonic. The same hang is told again until it is over."""
        tick_s = 0.0
        if self._asked_at >= 0:
            tick_s = min(max(0.0, now - self._asked_at), MOST_TICK_S)
        self._clock, self._asked_at = self._clock + tick_s, now
        if not self._all.ranks:
            return None
        self._all.look(self._clock, tick_s, now)
        return self._stopped() or self._behind(now)

    def _stopped(self) -> Hang | None:
        """A process that has been stopped is a fact, whatever it was doing."""
        least_s = self._limits.quick_s if self._limits.stopped_s is None else self._limits.stopped_s
        stopped = np.flatnonzero(self._clock - self._all.stopped_at >= least_s).tolist()
        if not stopped:
            return None
        i = min(stopped, key=lambda i: (self._all.marks[i], self._all.ranks[i]))
        state = self._kernel.signs(self._all.ranks[i], self._all.pids[i]).state
        return self._hang(i, f"its process (pid {self._all.pids[i]}) is in state {state}")

    def _behind(self, now: float) -> Hang | None:
        """The rank that is behind, when it has stood still for longer than it may and nobody else moves."""
        ranks, clock, quick_s = self._all, self._clock, self._limits.quick_s
        silent_s = ranks.silent_s(clock)
        if silent_s.min() < quick_s / 2:
            return None
        if self._groups_changed():
            self._waited_for = waited_for(self._groups)
        found = suspects(ranks.marks, self._waited_for)
        among = np.array(found.among)
        if (slow := among[ranks.works(clock, quick_s)[among]]).size:
            i = int(slow[0])
            if silent_s[i] < self._limits_s([i])[0]:
                return None
            return self._hang(i, named(found, ranks.samples, now)[1], works=True)
        idle_s = ranks.idle_s(clock)[among]
        if not ranks.measured[among].all() or idle_s.min() < min(quick_s, self._limits.long_s):
            return None
        if not (idle_s >= self._limits_s(found.among)).all():
            return None
        return self._hang(*named(found, ranks.samples, now))

    def _groups_changed(self) -> bool:
        """Texts that are the same are decoded once (`pulse_file`), so that the same groups are the same object."""
        changed = False
        for i in self._all.sampled:
            if (sample := self._all.samples[i]) is not None and sample.groups is not self._groups[i]:
                self._groups[i], changed = sample.groups, True
        self._all.sampled.clear()
        return changed

    def _limits_s(self, among: Sequence[int]) -> NDArray[np.float64]:
        """By the slowest recent step and stay in the phase, of all ranks; long, until both have been measured."""
        ranks, limits = self._all, self._limits
        beats = [beat for beat in ranks.beats if beat is not None]
        step_s = max((b.slowest_s for b in beats), default=0.0)

        def limit_s(phase: str, excused: bool) -> float:
            stay_s = max((b.longest_s[phase] for b in beats), default=0.0)
            if not step_s or not stay_s or phase in LONG_PHASES or excused:
                return limits.long_s
            return max(limits.least_s.get(phase, limits.quick_s), STEPS * step_s, STEPS * stay_s)

        kinds = [(ranks.phase(i), bool((sample := ranks.samples[i]) and sample.excuse)) for i in among]
        known = {kind: limit_s(*kind) for kind in set(kinds)}
        found = np.array([known[kind] for kind in kinds])
        slow_disk = self._clock - ranks.busy_disk_at[np.array(among)] < limits.quick_s
        found[slow_disk] = limits.long_s
        return found

    def _hang(self, i: int, why: str, works: bool = False) -> Hang:
        ranks, clock = self._all, self._clock
        rank, beat, phase = ranks.ranks[i], ranks.beats[i], ranks.phase(i)
        sample = self._pulses.sample(rank) or ranks.samples[i] or Sample(0.0)
        others = [j for j in sorted(range(len(ranks.ranks)), key=ranks.ranks.__getitem__) if j != i]
        still_s = ranks.silent_s(clock)[i] if works else ranks.idle_s(clock)[i]
        if not np.isnan(ranks.stopped_at[i]):
            still_s = clock - ranks.stopped_at[i]
        return Hang(
            rank=rank,
            pid=ranks.pids[i],
            step=0 if beat is None else beat.step + 1,
            phase=phase,
            seconds=float(still_s),
            stopped=bool(ranks.stopped[i]),
            why=why,
            stack=sample.stack,
            reader=sample.reader if phase == "data" else (),
            others=tuple(
                Other(ranks.ranks[j], ranks.phase(j), waiting_in(ranks.samples[j])) for j in others[:MOST_OTHERS]
            ),
            waiting=len(others),
            works=works,
            marks=int(ranks.marks[i]),
        )
