"""Which part of a step took how long: by the device's own timeline where it has one, else by the host's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.observe.steps import Steps, median, steps_of

# Parts of a step, and the phases of a device's timeline (`shoal.train.clock`) that make them up.
PARTS = {
    "data_s": ("wait_s",),
    "compute_s": ("forward_s", "backward_s", "compute_s", "clip_s"),
    "exchange_s": ("trade_s",),
    "optimizer_s": ("optimizer_s",),
}


def on_device(steps: Steps | Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase, the median of these steps; nothing of a run on a CPU. A record holds the phases of a step
    before it, and says of which."""
    steps = steps_of(steps)
    if not steps.told.has("device.step"):
        return {}
    known = np.sort(steps.column("step"))
    of = np.nan_to_num(steps.column("device.step"), nan=-1.0).astype(np.int64)
    told = known[np.minimum(np.searchsorted(known, of), len(known) - 1)] == of
    names = [name for name in steps.told.columns("device") if name.endswith("_s")]
    phases = ((name, steps.column(f"device.{name}")[told]) for name in names)  # one at a time
    return {name: median(np.nan_to_num(seconds)) for name, seconds in phases if not np.isnan(seconds).all()}


def parts(steps: Steps | Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each part of PARTS that these steps have, the median."""
    steps = steps_of(steps)
    if phases := on_device(steps):
        grouped = {part: [phases[name] for name in names if name in phases] for part, names in PARTS.items()}
        return {part: sum(seconds) for part, seconds in grouped.items() if seconds}
    laps = ((name, steps.column(f"time.{name}")) for name in steps.told.columns("time"))
    return {name: median(told) for name, lap in laps if (told := lap[~np.isnan(lap)]).size}
