"""Closes what a script's run leaves open: how many processes, and where they run. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.decide.auto import Decided
from shoal.decide.decision import Choices
from shoal.devices import visible_gpus
from shoal.errors import SpecError
from shoal.script.file import look_at
from shoal.script.horovod.needed import needed
from shoal.spec.run import Run
from shoal.spec.script import Script


def decide_script(run: Run) -> Decided:
    assert run.script is not None
    script, choices = run.script, Choices()
    look_at(Path(script.path))
    named = script.env.get("CUDA_VISIBLE_DEVICES")
    gpus = visible_gpus() if named is None else min(visible_gpus(), len([d for d in named.split(",") if d.strip()]))
    why = "one for each GPU" if gpus else "this machine has no GPU"
    world = int(choices.choose("script.processes", script.processes, max(1, gpus), why))
    mesh = script.accelerate.parallelism if script.accelerate is not None else None
    if mesh is not None and mesh.processes not in (1, world):  # of 1 Accelerate makes copies
        raise SpecError(
            f"the sizes of script.accelerate.parallelism make {mesh.processes} processes and script.processes is "
            f"{world}; make them equal."
        )
    folder = script.folder or os.getcwd()
    if not Path(folder).is_dir():
        raise SpecError(f"script.folder {folder} is no folder here; give the one that the script is to run in.")
    update = {"processes": world, "folder": folder, "horovod": _horovod(script, choices)}
    closed = script.model_copy(update=update)
    return Decided(run.model_copy(update={"script": closed}), world, tuple(choices.made))


def _horovod(script: Script, choices: Choices) -> bool:
    if script.horovod != "auto":
        return script.horovod
    if not needed(Path(script.path), script.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))):
        return False
    why = "it imports Horovod, which is not installed: Shoal's own, over torch.distributed, stands in for it"
    return bool(choices.choose("script.horovod", script.horovod, True, why))
