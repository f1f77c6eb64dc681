"""What the verbs of `shoal plan` ask of a run file and of a machine."""

from __future__ import annotations

import argparse
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import SetupError, SpecError, UsageError
from shoal.plan.catalogue import Device, Fabric, find, find_fabric
from shoal.plan.machine import Machine
from shoal.plan.search import Asked
from shoal.spec.resolve import load
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of


@dataclass(frozen=True)
class Target:
    device: Device
    fabric: Fabric | None
    devices: int

    @property
    def machine(self) -> Machine:
        return Machine.of(self.device, self.fabric)

    def asked(self, run: Run, shape: Shape) -> Asked:
        return Asked(run, shape, self.machine, self.devices)


def workspace(args: argparse.Namespace) -> Path:
    return Path(args.workspace or os.environ.get("SHOAL_WORKSPACE") or ".")


def wanted(args: argparse.Namespace) -> tuple[Run, Shape]:
    run = load(args.file, args.overrides or ()).run
    return run, shape_of(run.model, None if run.model.vocab_size != "auto" else _vocabulary(run, workspace(args)))


def target(args: argparse.Namespace, run: Run, name: str | None, fabric: str | None) -> Target:
    folders = [workspace(args) / "hardware"]
    device = find(name or _this_machine(), folders)
    devices = args.devices or (run.resources.processes if run.resources.processes != "auto" else device.per_node)
    if devices < 1:
        raise UsageError(f"--devices {devices}: at least one device is needed.")
    joined = None if fabric is None else find_fabric(fabric, device, folders)
    return Target(device, joined, int(devices))


def _vocabulary(run: Run, folder: Path) -> int:
    from shoal.data.sources import open_sources

    try:
        return open_sources(run.data.train, run.data, folder)[0].vocab_size
    except (SetupError, SpecError) as e:
        raise SpecError(
            f"model.vocab_size is auto, and the data that would say it cannot be opened: {str(e).rstrip('.')}; "
            "set model.vocab_size, as in `shoal plan RUN.yaml model.vocab_size=128256`."
        ) from e


def _this_machine() -> str:
    try:
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return told.strip().split("\n")[0] or "cpu"
