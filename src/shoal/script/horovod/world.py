"""Who is there: Horovod's init, ranks and sizes, from torch.distributed and what torchrun tells a process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WAITS = timedelta(days=1)  # for a rank that is busy alone; who hangs is the supervisor's to say


@dataclass
class World:
    """`said` is a group on the CPU in which ranks agree on what comes next."""

    said: Any
    own: bool  # whether the default group was made here


_here: list[World] = []  # at most one: Horovod's functions have no object to hold it


def init(comm: Any = None, process_sets: Any = None) -> None:
    if comm is not None or process_sets is not None:
        raise ImportError(
            "hvd.init with a communicator or process sets is not in Shoal's stand-in for Horovod: call it without."
        )
    if is_initialized():
        return
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    _here[:] = [World(dist.new_group(backend="gloo", timeout=WAITS), own)]


def shutdown() -> None:
    if is_initialized():
        if _here[0].own:
            dist.destroy_process_group()
        _here.clear()


def is_initialized() -> bool:
    return bool(_here) and dist.is_initialized()


def here() -> World:
    if not is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _here[0]


def rank() -> int:
    here()
    return dist.get_rank()


def size() -> int:
    here()
    return dist.get_world_size()


def local_rank() -> int:
    return _told("LOCAL_RANK", rank())


def local_size() -> int:
    return _told("LOCAL_WORLD_SIZE", size())


def cross_rank() -> int:
    """Which machine this is."""
    here()
    return _told("GROUP_RANK", 0)


def cross_size() -> int:
    here()
    return _told("GROUP_WORLD_SIZE", 1)


def _told(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def is_homogeneous() -> bool:
    return size() == local_size() * cross_size()


def gloo_built() -> bool:
    return True


def gloo_enabled() -> bool:
    return True


def nccl_built() -> int:
    return int(torch.cuda.is_available() and dist.is_nccl_available())


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None


def mpi_built() -> bool:
    return False


def mpi_enabled() -> bool:
    return False


def mpi_threads_supported() -> bool:
    return False


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False
