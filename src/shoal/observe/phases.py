"""Which part of a step took how long: by the device's own timeline where it has one, else by the host's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

# Parts of a step, and the phases of a device's timeline (`shoal.train.clock`) that make them up.
PARTS = {
    "data_s": ("wait_s",),
    "compute_s": ("forward_s", "backward_s", "compute_s", "clip_s"),
    "exchange_s": ("trade_s",),
    "optimizer_s": ("optimizer_s",),
}


def on_device(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase, the median of these steps; nothing of a run on a CPU. A record holds the phases of a step
    before it, and says of which."""
    wanted = {int(record["step"]) for record in steps}
    told = [device for record in steps if (device := record.get("device")) and int(device.get("step", -1)) in wanted]
    names = dict.fromkeys(name for device in told for name in device if name.endswith("_s"))
    return {name: median(float(device.get(name, 0.0)) for device in told) for name in names}


def parts(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each part of PARTS that these steps have, the median."""
    if phases := on_device(steps):
        grouped = {part: [phases[name] for name in names if name in phases] for part, names in PARTS.items()}
        return {part: sum(seconds) for part, seconds in grouped.items() if seconds}
    laps: dict[str, list[float]] = {}
    for record in steps:
        for name, seconds in (record.get("time") or {}).items():
            laps.setdefault(name, []).append(float(seconds))
    return {name: median(values) for name, values in laps.items()}
