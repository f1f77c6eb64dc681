"""Says which rank is persistently slower than the others, and in what. Never imports torch.

In a synchronous run everybody takes as long as the slowest, so the length of a step tells nothing: what tells is the
time that a rank spends on work of its own. Phases in which a rank waits for others are left out; in some layouts that
includes the forward pass (FSDP gathers in it), and then a slow one looks like the others and is not named.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.observe.beat import LAZY_STEPS

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


@dataclass(frozen=True)
class Straggler:
    rank: int
    phase: str
    own_s: float  # a step, in that phase
    usual_s: float  # of the others' median
    step_s: float
    steps: int  # looked at

    def fields(self) -> dict[str, Any]:
        """For its journal record."""
        seconds = {"own_s": self.own_s, "usual_s": self.usual_s, "step_s": self.step_s}
        return {"phase": self.phase, "steps": self.steps} | {name: round(s, 6) for name, s in seconds.items()}

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
        if len(beats) < 2 or min(b.steps for b in beats.values()) <= LAZY_STEPS:
            return []
        if self._from is None or self._from[1].keys() != beats.keys():
            self._from = now, beats
            return []
        began, before = self._from
        if now - began < self._window_s or min(beats[r].steps - before[r].steps for r in beats) < STEPS:
            return []
        self._from = now, beats
        slow = slow_ranks(before, beats, now - began)
        self._slow = {s.rank: self._slow.get(s.rank, 0) + 1 for s in slow}
        certain = [s for s in slow if self._slow[s.rank] >= WINDOWS and now >= self._told.get(s.rank, now)]
        self._told |= {s.rank: now + AGAIN_S for s in certain}
        return certain


def slow_ranks(before: Mapping[int, Spent], after: Mapping[int, Spent], seconds: float) -> list[Straggler]:
    """The ranks whose own work takes clearly longer than that of the others, the slowest first."""
    steps = min(after[r].steps - before[r].steps for r in after)
    own = {
        rank: {phase: (b.spent_s[phase] - before[rank].spent_s[phase]) / steps for phase in OWN}
        for rank, b in after.items()
    }
    found = []
    for rank, mine in own.items():
        others = [o for other, o in own.items() if other != rank]
        usual_s = statistics.median(sum(o.values()) for o in others)
        total_s, step_s = sum(mine.values()), seconds / steps
        if total_s <= RATIO * usual_s or total_s - usual_s < OF_STEP * step_s:
            continue
        usual = {phase: statistics.median(o[phase] for o in others) for phase in OWN}
        phase = max(OWN, key=lambda phase: mine[phase] - usual[phase])
        found.append(Straggler(rank, OWN[phase], mine[phase], usual[phase], step_s, steps))
    return sorted(found, key=lambda s: s.usual_s - s.own_s)
