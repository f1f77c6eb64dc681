"""What a run that is about to start is expected to take on this machine: `plan.json` in its directory.

`shoal report` lays it beside what was measured. The figures are those of `shoal bench` if it has been run here, else
the catalogue's, and the plan says which.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.devices import gpus
from shoal.plan.asked import Asked
from shoal.plan.calibrate import calibrated
from shoal.plan.catalogue import find
from shoal.plan.constants import spread
from shoal.plan.documents import Documents
from shoal.plan.machine import Machine
from shoal.plan.search import priced
from shoal.spec.mesh import Layout
from shoal.spec.run import Run
from shoal.spec.shape import Shape


def this_device() -> str:
    """The name of this machine's GPUs, as their driver tells it; else its processor."""
    return next((gpu.name for gpu in gpus()), "cpu")


def expected(
    run: Run, shape: Shape, folders: Sequence[Path] = (), documents: Documents | None = None
) -> dict[str, Any]:
    """Of a run with nothing left open."""
    cpu = run.resources.device == "cpu"
    device = find("cpu" if cpu else this_device(), folders)
    everybody = int(run.resources.processes) * run.fleet.islands
    whole = Machine.of(device, folders=folders)
    machine = whole.divided(everybody) if cpu else whole
    layout = Layout.of(run.mesh)
    asked = Asked(run, shape, machine, everybody, calibrated(device), documents)
    found = priced(asked, layout, str(run.mesh.recompute))
    low, high = spread()
    seconds = found.seconds
    return {
        "device": device.name,
        "devices": everybody,
        "figures": f"shoal bench of {device.measured.when}" if device.measured else "the catalogue",
        "step_s": seconds,
        "step_low_s": seconds / high,
        "step_high_s": seconds / low,
        "parts_s": found.parts,
        "tokens_s": run.train.batch * run.data.seq_len / seconds,
        "memory_bytes": found.memory.total,
        "documents": asked.seen.as_json(),
        "load": round(os.getloadavg()[0], 1),  # of this whole machine, now: what else it is doing
        "cores": os.cpu_count() or 1,
    }
