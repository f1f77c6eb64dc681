"""Where this process stands: its rank, its device, its place in the mesh; joining and leaving the group."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.errors import SetupError
from shoal.spec.run import Run

JOIN_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Place:
    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None  # (replicate, shard); None when alone

    def sum(self, *values: float) -> list[float]:
        """Sums host numbers over all processes, in float64 and on the CPU: no device is made to wait."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(v) for v in total]

    def sum_on_device(self, value: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.all_reduce(value)
        return value


def join(run: Run) -> Place:
    """Join the group that RANK, WORLD_SIZE and SHOAL_RENDEZVOUS (or torchrun's MASTER_*) describe."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(run, int(os.environ.get("LOCAL_RANK", "0")))
    if world == 1:
        return Place(rank, world, device, None)
    # Host numbers travel by gloo even beside NCCL, so that counting tokens never synchronises a GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    address = os.environ.get("SHOAL_RENDEZVOUS", "env://")
    if not dist.is_initialized():
        if address == "env://":
            dist.init_process_group(backend, timeout=JOIN_TIMEOUT)
        else:
            dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=JOIN_TIMEOUT)
    sizes = (int(run.mesh.dp_replicate), int(run.mesh.dp_shard))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    return Place(rank, world, device, mesh)


def leave(place: Place) -> None:
    """End together: leaving without a barrier aborts a process in 1 of 20 runs (gloo teardown race)."""
    if place.world > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _device(run: Run, local_rank: int) -> torch.device:
    if run.resources.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SetupError("resources.device is cuda but this torch sees no GPU: check the driver, or set it to cpu.")
    if local_rank >= torch.cuda.device_count():
        raise SetupError(
            f"process {local_rank} has no GPU of its own ({torch.cuda.device_count()} are visible): "
            "lower resources.processes."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
