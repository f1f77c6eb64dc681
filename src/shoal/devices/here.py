"""This machine's GPUs. Where it has both NVIDIA's and AMD's, those that the installed torch was built for."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from shoal.devices import amd, nvidia
from shoal.devices.gpu import Gpu, Unanswered, Vendor, allowed
from shoal.devices.torch_build import build


def vendor(root: Path = Path("/")) -> Vendor | None:
    """Whose GPUs this machine has; None: nobody's that Shoal knows."""
    there: list[Vendor] = ["nvidia"] if nvidia.count(root) else []
    there += ["amd"] if amd.nameless(root) else []
    if len(there) == 2:
        return "amd" if build() == "rocm" else "nvidia"
    return there[0] if there else None


def visible_gpus(root: Path = Path("/")) -> int:
    """How many this process may use, without starting any driver's tool."""
    return len(allowed(_nameless(root), os.environ))


@cache
def gpus() -> tuple[Gpu, ...]:
    """Those that this process may use, asked once; empty where there are none or their driver does not answer."""
    match vendor():
        case "nvidia":
            try:
                found = nvidia.listed()
            except Unanswered:
                return ()
        case "amd":
            found = amd.listed()
        case None:
            return ()
    return tuple(allowed(found, os.environ))


def on_the_bus(root: Path = Path("/")) -> list[str | None]:
    """Where each GPU that this process may use is on the bus, in its own order; no tool is started."""
    return [gpu.bus for gpu in allowed(_nameless(root), os.environ)]


def all_on_the_bus(root: Path = Path("/")) -> list[str | None]:
    """The same of all that can be seen, whoever may use them."""
    return [gpu.bus for gpu in _nameless(root)]


def _nameless(root: Path) -> list[Gpu]:
    match vendor(root):
        case "nvidia":
            return nvidia.nameless(root)
        case "amd":
            return amd.nameless(root)
        case None:
            return []


def problem(asked: int, limit_s: float) -> str | None:
    """Why so many GPUs cannot be used on this node, as a sentence without its full stop; None if they can."""
    if vendor() is None and Path("/dev/kfd").exists():  # a node of AMD's whose GPUs are not given to us
        return amd.problem(asked, limit_s)
    return amd.problem(asked, limit_s) if vendor() == "amd" else nvidia.problem(asked, limit_s)
