"""The learning rate as a pure function of the step: nothing to save, nothing to replay."""

from __future__ import annotations

import math

from shoal.spec.length import decay_steps, warmup_steps
from shoal.spec.run import Schedule


def lr_ratio(schedule: Schedule, step: int, steps: int) -> float:
    """Multiple of the peak for step `step` (0-based) of `steps`."""
    warmup = warmup_steps(schedule.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    floor = schedule.min_ratio
    if schedule.name == "cosine":
        done = (step - warmup) / max(1, steps - 1 - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    decay = decay_steps(schedule.decay_steps, steps)
    left = (steps - 1 - step) / max(1, decay)  # 1 where the decay begins, 0 at the last step
    return floor + (1 - floor) * min(1.0, max(0.0, left))
