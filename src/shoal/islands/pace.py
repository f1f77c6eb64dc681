"""Which island is slower than the others: in every trade each says how long its own work took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.guard.straggler import OWN, SECONDS, Straggler, Stragglers
from shoal.journal.beat import UNKNOWN_S

WINDOW_S = SECONDS
REST_S = 60.0  # of an island that leaves for being slow; twice as long each time
MOST_REST_S = 1200.0  # well below what the watch over its processes allows for joining


@dataclass(frozen=True)
class Tally:
    """What an island has spent, as if each step had dealt it an equal share."""

    steps: int = 0
    spent_s: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(OWN, 0.0))
    device_s: float = UNKNOWN_S  # an island's ranks are compared with each other, by who watches them

    def after(self, seconds: Mapping[str, float], shares: float) -> Tally:
        """`shares`: of an equal share of the batch, what it had to do."""
        spent = {phase: spent + seconds.get(phase, 0.0) / shares for phase, spent in self.spent_s.items()}
        return Tally(self.steps + 1, spent)


class Pace:
    def __init__(self) -> None:
        self._stragglers = Stragglers(WINDOW_S)
        self._tallies: dict[int, Tally] = {}

    def heard(self, said: Sequence[dict[str, Any]]) -> list[Straggler]:
        """After a step: islands (as ranks) that are slow, once that is certain."""
        shards = {int(s["island"]): len(s["shards"]) for s in said}
        if not all(shards.values()):
            return []
        equal = sum(shards.values()) / len(shards)
        before = {island: self._tallies.get(island, Tally()) for island in shards}
        seconds = {int(s["island"]): s["seconds"] for s in said}
        self._tallies = {i: tally.after(seconds[i], shards[i] / equal) for i, tally in before.items()}
        return self._stragglers.look(self._tallies, time.monotonic())


def rest_s(times: int) -> float:
    """How long the island that was slow so many times stays away."""
    return min(REST_S * 2 ** (times - 1), MOST_REST_S)
