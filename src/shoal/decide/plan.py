"""Asks the planner for the layout, where it knows the accelerators: the fastest of all that fit. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.decide.torch_installed import impossible_schedules
from shoal.errors import ShoalError
from shoal.spec.mesh import Layout, divisors
from shoal.spec.run import Run
from shoal.spec.shape import Shape

if TYPE_CHECKING:  # numpy: only those who have GPUs wait for it
    from shoal.plan.asked import Asked
    from shoal.plan.documents import Documents
    from shoal.plan.search import Found

# Of the speed with as many windows at once as fit, what may be left for a smaller number of them.
NEAR = 0.01


@dataclass(frozen=True)
class Planned:
    layout: Layout
    why: str
    why_micro_batch: str


def planned(
    run: Run, shape: Shape, devices: int, folders: Sequence[Path], documents: Documents | None = None
) -> Planned | None:
    """On so many devices of each island. None where the rules decide: on accelerators that nobody has described, or
    when none is known to fit."""
    from shoal.plan.asked import Asked
    from shoal.plan.calibrate import calibrated
    from shoal.plan.catalogue import devices as known_devices
    from shoal.plan.catalogue import find
    from shoal.plan.expect import this_device
    from shoal.plan.explain import words
    from shoal.plan.machine import Machine
    from shoal.plan.memory import memory_budget
    from shoal.plan.search import USABLE, search

    name = this_device()
    if name == "cpu":
        return None
    known_devices(folders)  # a file of one's own that cannot be read is told, not passed over
    try:
        device = find(name, folders)
        everybody = devices * run.fleet.islands
        machine = Machine.of(device, None, folders)
        if (budget := memory_budget("cuda", devices)) is not None:  # what the card says, not what its kind has
            machine = replace(machine, memory=budget / USABLE)
        asked = Asked(run, shape, machine, everybody, calibrated(device), documents, impossible_schedules())
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
    layout, why_micro_batch = _windows(asked, found[0])
    return Planned(layout, why, why_micro_batch)


def _windows(asked: Asked, best: Found) -> tuple[Layout, str]:
    """The layout with as many windows at once as speed asks for, of those that fit into memory. The last percent is not
    worth a card that is full to the brim, and predictions are off by more. A pipeline's windows are the search's."""
    from shoal.plan.layouts import reduces
    from shoal.plan.search import all_priced

    layout, seq = best.layout, asked.run.data.seq_len // best.layout.sizes.cp
    if asked.run.mesh.micro_batch == "auto" and layout.sizes.pp == 1:
        each = asked.work.batch // layout.sizes.dp
        every = [
            replace(layout, micro_batch=n, reduce=way)
            for n in divisors(each)
            for way in reduces(asked.run.mesh, layout.sizes, each // n)
        ]
        tried = [one for one in all_priced(asked, every, [best.recompute]) if one.fits]
        fastest = min(one.seconds for one in tried)
        near = [one for one in tried if one.seconds <= fastest * (1 + NEAR)]
        best = min(near, key=lambda one: (one.layout.micro_batch, one.seconds))
    micro = best.layout.micro_batch
    used, may = best.memory.total / 1e9, best.budget / 1e9
    why = f"{micro * seq:,} tokens at once, predicted to take {used:.3g} of the {may:.3g} GB that may be filled"
    return best.layout, f"{why}; more would not be {NEAR:.0%} faster, or not fit"
