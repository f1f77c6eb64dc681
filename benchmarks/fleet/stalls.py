"""How long training stood still around a fault, from the times at which steps ended."""

from __future__ import annotations

from itertools import pairwise
from statistics import median


def stalls(faults: list[float], ticks: list[float]) -> list[float]:
    """The longest pause between the ends of two steps around each fault, less the usual time of a step."""
    usual = median(b - a for a, b in pairwise(ticks))
    found = []
    for at in faults:
        after = next((i for i, t in enumerate(ticks) if t > at), None)
        if after:
            found.append(max(0.0, max(b - a for a, b in pairwise(ticks[after - 1 : after + 3])) - usual))
    return found
