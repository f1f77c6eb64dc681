"""The learning rate as a pure function of the step: nothing to save, nothing to replay.

A run that was prolonged has the schedules of its past in its run file (`train.schedule.past`), so a step has the rate
that it had, whoever takes it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shoal.errors import SpecError
from shoal.spec.length import decay_steps, warmup_steps
from shoal.spec.run import Run
from shoal.spec.schedule import Past, Schedule


def lr_ratio(schedule: Schedule, step: int, steps: int) -> float:
    """Multiple of the peak for step `step` (0-based) of `steps`."""
    return _after(schedule.past, schedule, step, steps)


def rates(run: Run, own: Callable[[int, int], Any] | None) -> Callable[[int], float]:
    """`lr_ratio` of a run by the step alone; `own`: a function of somebody's own in its place."""
    if own is None:
        return lambda step: lr_ratio(run.train.schedule, step, run.steps)

    def ratio(step: int) -> float:
        found = own(step, run.steps)
        if not isinstance(found, int | float) or not math.isfinite(found) or found < 0:
            raise SpecError(f"own.schedule gave {found!r} for step {step}; it must give a number of at least 0.")
        return float(found)

    return ratio


def _after(past: tuple[Past, ...], now: Schedule | Past, step: int, steps: int) -> float:
    """The ratio by `now`, which replaced the last schedule of `past`."""
    if not past:
        return _alone(now, step, steps)
    earlier = past[:-1]
    last: Past = past[-1]
    if step < last.until:
        return _after(earlier, last, step, last.steps)
    if last.then is None or last.then == "jump":
        return _after(earlier, now, step, steps)  # as if it had been so since the last choice
    had = _after(earlier, last, last.until, last.steps)
    if last.then == "keep":
        return had
    done, rest = step - last.until, steps - last.until
    if last.then == "decay":
        return _falling(now.name == "cosine", had, now.min_ratio, done / max(1, rest - 1))
    warmup = warmup_steps(now.warmup_steps, rest)
    return had + (1 - had) * (done + 1) / warmup if done < warmup else _alone(now, done, rest)


def _alone(schedule: Schedule | Past, step: int, steps: int) -> float:
    warmup = warmup_steps(schedule.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        return _falling(True, 1.0, schedule.min_ratio, (step - warmup) / max(1, steps - 1 - warmup))
    decay = decay_steps(schedule.decay_steps, steps)
    left = (steps - 1 - step) / max(1, decay)  # 1 where the decay begins, 0 at the last step
    floor = schedule.min_ratio
    return floor + (1 - floor) * min(1.0, max(0.0, left))


def _falling(cosine: bool, top: float, floor: float, done: float) -> float:
    """From `top` to `floor`, where a share `done` of the way is gone."""
    done = min(1.0, done)
    return floor + (top - floor) * (0.5 * (1 + math.cos(math.pi * done)) if cosine else 1 - done)
