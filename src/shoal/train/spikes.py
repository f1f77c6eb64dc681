"""Finds a spike in the loss: a robust detector over the last steps. Pure; no torch here.

A step is out of line when its loss lies far above the median of the 64 steps before, measured by how much those differ
from each other (the median absolute deviation: one odd step among them moves neither). One such step is a hard batch,
and the next update mends it. Three in a row are a spike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW = 64  # steps that say what is usual; before there are as many, nothing is judged
ROW = 3  # steps out of line, one after the other
SIGMA = 1.4826  # times the median absolute deviation is the standard deviation, where noise is normal


@dataclass(frozen=True)
class Limit:
    """How far above the usual is out of line: all three must be passed."""

    sigmas: float
    share: float  # of the median
    least: float


# In nats. Curves of small batches are noisy, and the sigmas decide; those of large ones are so smooth that a tenth
# of a nat may be many of them, and the share does. The norm of a gradient has a long tail, and clipping deals with it.
LOSS = Limit(sigmas=8.0, share=0.1, least=0.05)
NORM = Limit(sigmas=20.0, share=4.0, least=0.0)


@dataclass(frozen=True)
class Taken:
    """A step that was taken, counted from 1, with its loss and the norm of its gradient before clipping."""

    step: int
    loss: float
    norm: float


@dataclass(frozen=True)
class Spike:
    first: int  # the step that began it, counted from 1
    why: str


def spike(taken: Iterable[Taken]) -> Spike | None:
    """Whether the last steps are one; a function of the last `WINDOW` + `ROW` steps and of nothing else."""
    steps = list(taken)[-WINDOW - ROW :]
    if len(steps) < WINDOW + ROW:
        return None
    usual, last = steps[:-ROW], steps[-ROW:]
    for name, limit in (("loss", LOSS), ("norm", NORM)):
        median, line = _line([getattr(one, name) for one in usual], limit)
        values = [getattr(one, name) for one in last]
        if min(values) > line:
            what = {"loss": "loss", "norm": "gradient norm"}[name]
            shown = ", ".join(f"{value:.4g}" for value in values)
            why = f"{what} {shown} in steps {last[0].step} to {last[-1].step}, after {median:.4g} (limit {line:.4g})"
            return Spike(last[0].step, why)
    return None


def _line(values: list[float], limit: Limit) -> tuple[float, float]:
    """(median, what must not be passed)"""
    median = statistics.median(values)
    deviation = SIGMA * statistics.median(abs(value - median) for value in values)
    return median, median + max(limit.sigmas * deviation, limit.share * abs(median), limit.least)
