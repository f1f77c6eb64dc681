"""Says which rank is persistently slower than the others, and in what. Never imports torch.

In a synchronous run everybody takes as long as the slowest, so the length of a step tells nothing: what tells is the
time that a rank spends on work of its own. Phases in which a rank waits for others are left out. Where the CPU computes
that may include the forward pass (FSDP gathers in it), and then a slow one looks like the others and is not named;
where a GPU does, its own clock tells (shoal.guard.slow_device), and the host's is asked about the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shoal.guard.others import median_of_others
from shoal.journal.beat import LAZY_STEPS

OWN = {
    "data": "data",
    "forward": "compute",
    "optimizer": "optimizer",
    "record": "between steps",
    "save": "checkpoint",
}
RATIO = 1.3
OF_STEP = 0.1  # what it costs at least, as a share of a step: twice nothing is nothing
STEPS, SECONDS = 10, 10.0  # a window is at least so long
WINDOWS = 2  # in a row
AGAIN_S = 600.0


class Spent(Protocol):
    """What is looked at: a rank's `Beat`, or an island's tally."""

    @property
    def steps(self) -> int: ...
    @property
    def spent_s(self) -> Mapping[str, float]: ...
    @property
    def device_s(self) -> float: ...


@dataclass(frozen=True)
class Straggler:
    rank: int
    phase: str
    own_s: float  # a step, in that phase
    usual_s: float  # of the others' median
    step_s: float
    steps: int  # looked at
    by: str = "host"  # or device: whose clock has shown it
    among: tuple[int, ...] = ()  # it is one of these, where ranks cannot be told apart

    def fields(self) -> dict[str, Any]:
        """For its journal record."""
        seconds = {"own_s": self.own_s, "usual_s": self.usual_s, "step_s": self.step_s}
        about = {"phase": self.phase, "steps": self.steps, "by": self.by}
        return (
            about | ({"ranks": list(self.among)} if self.among else {}) | {n: round(s, 6) for n, s in seconds.items()}
        )

    @property
    def costs(self) -> float:
        """Share of a step that the others wait."""
        return (self.own_s - self.usual_s) / self.step_s


class Stragglers:
    """Of one group."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._window_s = seconds
        self._from: tuple[float, Mapping[int, Spent]] | None = None
        self._slow: dict[int, int] = {}  # rank → windows in a row
        self._told: dict[int, float] = {}

    def look(self, beats: Mapping[int, Spent], now: float) -> list[Straggler]:
        """What has become certain, the slowest first; each is told once in a while."""
        if self._from is not None and now - self._from[0] < self._window_s:
            return []
        if len(beats) < 2 or min(b.steps for b in beats.values()) <= LAZY_STEPS:
            return []
        if self._from is None or self._from[1].keys() != beats.keys():
            self._from = now, beats
            return []
        began, before = self._from
        if min(beats[r].steps - before[r].steps for r in beats) < STEPS:
            return []
        self._from = now, beats
        slow = slow_ranks(before, beats, now - began)
        self._slow = {s.rank: self._slow.get(s.rank, 0) + 1 for s in slow}
        certain = [s for s in slow if self._slow[s.rank] >= WINDOWS and now >= self._told.get(s.rank, now)]
        self._told |= {s.rank: now + AGAIN_S for s in certain}
        return certain


def slow_ranks(before: Mapping[int, Spent], after: Mapping[int, Spent], seconds: float) -> list[Straggler]:
    """The ranks whose own work takes clearly longer than that of the others, the slowest first."""
    ranks, steps = list(after), min(after[r].steps - before[r].steps for r in after)
    step_s = seconds / steps
    # What the host does in a forward pass of a GPU is to queue it.
    phases = [phase for phase in OWN if phase != "forward" or min(b.device_s for b in after.values()) < 0]
    own_s = {
        phase: np.array([after[r].spent_s[phase] - before[r].spent_s[phase] for r in ranks]) / steps for phase in phases
    }
    total_s = np.zeros(len(ranks))
    for spent_s in own_s.values():
        total_s += spent_s
    usual_s = median_of_others(total_s)
    slow = np.flatnonzero((total_s > RATIO * usual_s) & (total_s - usual_s >= OF_STEP * step_s)).tolist()
    if not slow:
        return []
    usual = {phase: median_of_others(spent_s) for phase, spent_s in own_s.items()}
    found = []
    for i in slow:
        more_s = {phase: float(own_s[phase][i] - usual[phase][i]) for phase in phases}
        phase = max(phases, key=more_s.__getitem__)
        found.append(Straggler(ranks[i], OWN[phase], float(own_s[phase][i]), float(usual[phase][i]), step_s, steps))
    return sorted(found, key=lambda s: s.usual_s - s.own_s)
