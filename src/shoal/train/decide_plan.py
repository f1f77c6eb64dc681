"""Asks the planner for the layout, where it knows the accelerators: the fastest of all that fit. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError
from shoal.spec.mesh import Layout
from shoal.spec.run import Run
from shoal.spec.shape import Shape


@dataclass(frozen=True)
class Planned:
    layout: Layout
    why: str


def planned(run: Run, shape: Shape, devices: int, folders: Sequence[Path]) -> Planned | None:
    """On so many devices of each island. None where the rules decide: on accelerators that nobody has described, or
    when none is known to fit."""
    from shoal.plan.asked import Asked  # numpy: only those who have GPUs wait for it
    from shoal.plan.calibrate import calibrated
    from shoal.plan.catalogue import devices as known_devices
    from shoal.plan.catalogue import find
    from shoal.plan.expect import this_device
    from shoal.plan.explain import words
    from shoal.plan.machine import Machine
    from shoal.plan.search import search

    name = this_device()
    if name == "cpu":
        return None
    known_devices(folders)  # a file of one's own that cannot be read is told, not passed over
    try:
        device = find(name, folders)
        everybody = devices * run.fleet.islands
        asked = Asked(run, shape, Machine.of(device, None, folders), everybody, calibrated(device))
        found = search(asked, 2)
    except ShoalError:
        return None
    if not found or not found[0].fits:
        return None
    where = f"{devices} {device.name}" + " of each island" * (run.fleet.islands > 1)
    why = f"the fastest of all layouts on {where} as predicted, {found[0].seconds:.3g} s a step"
    if len(found) > 1 and found[1].fits:
        gain = found[1].seconds / found[0].seconds - 1
        why += f", {gain:.1%} less than {words(found[1].layout, found[1].recompute)}"
    return Planned(found[0].layout, why)
