"""What a run that fails at random gets done between two failures, exactly, and how often to save. Formulas alone.

Failures come lambda times a second, also while a checkpoint is written and while the run restarts. With T seconds of
steps between saves that block b seconds each and are safe D seconds after that, a failure that is noticed after d, and
restarts that take r and start over when the next failure comes:

    training = lambda T / (exp(lambda (T + b)) - 1)  *  exp(-lambda D)  *  E[exp(-lambda r)] / (1 + lambda d)

From one failure to the next the run is up 1/lambda on average and completes exp(-lambda (T+b+D)) /
(1 - exp(-lambda (T+b))) saves: the first after a restart needs T+b+D without a failure, the following ones T+b more.
Each try to come back succeeds with E[exp(-lambda r)]. For few failures this is the form of Kokolis et al.,
(1 - lambda (d + r + D + T/2)) / (1 + b/T), which becomes negative where lambda r is above 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST = 700.0  # exp of more is no float


@dataclass(frozen=True)
class Cycle:
    """Shares of the time from one failure to the next; they sum to 1."""

    training: float
    checkpoint: float
    lost: float
    detection: float
    coming_back: float


def cycle(
    rate: float,
    work_s: float,
    blocking_s: float,
    late_s: float,
    detect_s: float,
    downs: Sequence[tuple[float, float]],
) -> Cycle:
    """`downs` are the times that coming back can take, each with its share of the failures."""
    save_s = work_s + blocking_s
    if not rate:
        return Cycle(work_s / save_s, blocking_s / save_s, 0.0, 0.0, 0.0)
    back = comes_back(rate, downs)
    if not back or rate * save_s > _LARGEST:
        return Cycle(0.0, 0.0, 0.0, 0.0, 1.0)  # never gets anywhere; where it waits no longer matters
    kept = math.exp(-rate * late_s) / math.expm1(rate * save_s)
    length_s = (1 + rate * detect_s) / (rate * back)
    return Cycle(
        kept * work_s / length_s,
        kept * blocking_s / length_s,
        (1 / rate - kept * save_s) / length_s,
        detect_s / back / length_s,
        (1 - back) / (rate * back) / length_s,
    )


def comes_back(rate: float, downs: Sequence[tuple[float, float]]) -> float:
    """The chance that no failure meets a try to come back."""
    return sum(share * math.exp(-rate * down_s) for share, down_s in downs)


def few_failures(rate: float, down_s: float, work_s: float, blocking_s: float) -> float:
    """The closed form of Kokolis et al. (HPCA 2025), good while rate * down_s is small."""
    return (1 - rate * (down_s + work_s / 2)) / (1 + blocking_s / work_s)


def best_interval_s(cost_s: float, mttf_s: float) -> float:
    """Of work between saves, where `cycle` is greatest: 1 - x = exp(-x - c), x = T/M, c = b/M, by Newton's method."""
    c = cost_s / mttf_s
    x = min(1.0, math.sqrt(2 * c))
    for _ in range(50):
        e = math.exp(-x - c)
        if e == 1.0 or abs(1 - x - e) < 1e-15:
            break
        x -= (1 - x - e) / (e - 1)
    return x * mttf_s


def young_interval_s(cost_s: float, mttf_s: float) -> float:
    """Young's of 1974: the same for saves that are short against the time between failures."""
    return math.sqrt(2 * cost_s * mttf_s)


def daly_interval_s(cost_s: float, mttf_s: float) -> float:
    """Daly's of 2006, with two more terms."""
    x = cost_s / (2 * mttf_s)
    return young_interval_s(cost_s, mttf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s if x < 1 else mttf_s
