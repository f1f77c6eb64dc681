"""What a run that is about to start is expected to take on this machine: `plan.json` in its directory.

`shoal report` lays it beside what was measured. The figures are those of `shoal bench` if it has been run here, else
the catalogue's, and the plan says which.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.plan.asked import Asked
from shoal.plan.calibrate import calibrated
from shoal.plan.catalogue import Device, find
from shoal.plan.constants import spread
from shoal.plan.machine import Machine
from shoal.plan.search import priced
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.run import Run
from shoal.spec.shape import Shape

# Parts that a step has once, into however many shards its batch is cut.
ONCE = ("update", "host")


def this_device() -> str:
    """The name of this machine's GPUs, as their driver tells it; else its processor."""
    try:
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return told.strip().split("\n")[0] or "cpu"


def expected(run: Run, shape: Shape, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Of a run with nothing left open."""
    cpu = run.resources.device == "cpu"
    device = find("cpu" if cpu else this_device(), folders)
    sizes, processes = Sizes.of(run.mesh), int(run.resources.processes)
    whole = _in(device, run, folders)
    machine = _shared(whole, processes * run.fleet.islands) if cpu else whole
    shards = 1 if run.fleet.islands == 1 else int(run.fleet.shards)
    part = run.model_copy(update={"train": run.train.model_copy(update={"batch": run.train.batch // shards})})
    layout = Layout(sizes, int(run.mesh.micro_batch), str(run.mesh.schedule), str(run.mesh.cp_method))
    found = priced(Asked(part, shape, machine, sizes.world, calibrated(device)), layout, str(run.mesh.recompute))
    times = shards / run.fleet.islands  # an island computes its shards one after the other
    parts = {name: seconds * (1 if name in ONCE else times) for name, seconds in found.parts.items()}
    low, high = spread()
    seconds = sum(parts.values())
    return {
        "device": device.name,
        "devices": processes * run.fleet.islands,
        "figures": f"shoal bench of {device.measured.when}" if device.measured else "the catalogue",
        "step_s": seconds,
        "step_low_s": seconds / high,
        "step_high_s": seconds / low,
        "parts_s": parts,
        "tokens_s": run.train.batch * run.data.seq_len / seconds,
        "memory_bytes": found.memory.total,
    }


def _in(device: Device, run: Run, folders: Sequence[Path]) -> Machine:
    machine = Machine.of(device, folders=folders)
    best = device.ceiling("fp32")
    if run.train.precision != "fp32" or best is None:
        return machine
    wide = best * 1e12
    # Numbers of 32 bits: twice the bytes, at the same rate.
    return replace(machine, matmul=wide, matmul8=wide, matmul4=wide, bandwidth=machine.bandwidth / 2)


def _shared(machine: Machine, processes: int) -> Machine:
    """What one process has of a processor; they talk through its memory."""
    return replace(
        machine,
        matmul=machine.matmul / processes,
        bandwidth=machine.bandwidth / processes,
        memory=machine.memory / processes,
        link=machine.link / processes,
        per_peer=machine.per_peer / processes,
        domain=max(machine.domain, processes),
        units=1,
    )
