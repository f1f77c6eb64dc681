"""Which machine this is: what it calls itself, and what can be asked of it instead of measured."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.errors import UsageError


@dataclass(frozen=True)
class Machine:
    device: torch.device
    name: str  # as the driver, or the processor, says it
    vendor: str
    units: int  # multiprocessors, or the threads that torch computes with
    memory_gb: float  # of 2**30 bytes, as in the catalogue
    count: int  # devices of this kind here
    cache_bytes: int  # the last one before the memory; 0: not known
    software: str

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


def this_machine(asked: str) -> Machine:
    """`asked`: auto, cpu or cuda. Of several GPUs the first is measured."""
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise UsageError("--device is cuda, but torch sees no GPU here; leave it out to measure the processor.")
    return _gpu() if there and asked != "cpu" else _processor()


def busy(machine: Machine) -> str:
    """What else goes on here, in words; empty: not much."""
    if machine.cuda:
        free, total = torch.cuda.mem_get_info(machine.device)
        held = (total - free) / 2**30  # half of one is this process's own
        return f"{held:.0f} GB of this GPU are in use" if held > 2 else ""
    load = os.getloadavg()[0]
    return f"the load is {load:.1f}" if load > 0.75 * machine.units else ""


def _gpu() -> Machine:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    has = torch.cuda.get_device_properties(device)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    cudnn = torch.backends.cudnn.version()
    return Machine(
        device=device,
        name=torch.cuda.get_device_name(device),
        vendor="amd" if torch.version.hip else "nvidia",
        units=has.multi_processor_count,
        memory_gb=has.total_memory / 2**30,
        count=torch.cuda.device_count(),
        cache_bytes=getattr(has, "L2_cache_size", 0),
        software=f"torch {torch.__version__}, {runtime}" + (f", cuDNN {cudnn}" if cudnn else ""),
    )


def _processor() -> Machine:
    threads = torch.get_num_threads()
    return Machine(
        device=torch.device("cpu"),
        name=processor_name(),
        vendor="any",
        units=threads,
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        count=1,
        cache_bytes=0,
        software=f"torch {torch.__version__}, {threads} thread{'s' if threads > 1 else ''}",
    )


def processor_name(told: Path = Path("/proc/cpuinfo")) -> str:
    lines = told.read_text(errors="replace").splitlines() if told.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, named), "") or platform.processor() or platform.machine() or "CPU"
