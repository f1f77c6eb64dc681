"""Questions to the planner: a preset's model with its mesh left open, on machines of the catalogue; single cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.plan.asked import Asked
from shoal.plan.case import Case, Plan
from shoal.plan.catalogue import find
from shoal.plan.machine import Machine
from shoal.plan.net import Net
from shoal.plan.software import Software
from shoal.spec.presets import presets
from shoal.spec.run import Run
from shoal.spec.shape import shape_of

OF_A_CASE = ("devices", "batch", "seq", "precision", "software")
LLAMA_8B = Net(32, 4096, 32, 8, 128, 14336, 3, 128256, tied=False)
H100 = Machine.of(find("h100"))


def case(machine: Machine = H100, net: Net = LLAMA_8B, **changes: Any) -> Case:
    """8B on 64 H100; `changes` are of the case or of its plan."""
    own = {name: changes.pop(name) for name in OF_A_CASE if name in changes}
    return replace(Case(net, machine, Software(2024.5), Plan(**changes), 64, 256, 8192), **own)


def asked(
    model: str | dict[str, Any], devices: int, batch: int, on: str = "h100", seq: int = 4096, **mesh: Any
) -> Asked:
    """Of a preset, or of a model of one's own; the mesh is open but for what is named."""
    run = Run.model_validate(
        {
            "name": "asked",
            "model": presets()[model].model if isinstance(model, str) else model,
            "data": {"train": "data", "seq_len": seq},
            "train": {"steps": 1000, "batch": batch, "compile": False},
            "mesh": mesh,
        }
    )
    return Asked(run, shape_of(run.model), Machine.of(find(on)), devices)
