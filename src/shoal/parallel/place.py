"""Where this process stands: its rank, its device, its place in the mesh; joining and leaving the group."""

from __future__ import annotations

import datetime
import os
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal import shared_gpu, ways
from shoal.devices import cores
from shoal.errors import SetupError
from shoal.parallel.groups import Groups
from shoal.spec.mesh import Sizes
from shoal.spec.run import Run

JOIN_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Summing:
    """A sum over all processes that is under way."""

    _total: torch.Tensor
    _work: dist.Work | None  # None when alone
    _copies: int  # of each number, in the sum

    def wait(self) -> list[float]:
        if self._work is not None:
            self._work.wait()
        return [float(v) / self._copies for v in self._total]


@dataclass(frozen=True)
class Place:
    rank: int
    world: int
    device: torch.device
    sizes: Sizes = field(default_factory=Sizes)
    dense: DeviceMesh | None = None  # (pp, replicate, shard, tp); "shard" is dp_shard x cp. None when alone
    context: dist.ProcessGroup | None = None  # the processes that share this one's sequences; None unless cp > 1
    expert: DeviceMesh | None = None  # (pp, replicate, shard, ep); None unless there are experts to share

    @property
    def at(self) -> dict[str, int]:
        return self.sizes.coordinate(self.rank)

    def sum(self, *values: float) -> list[float]:
        """Sums host numbers over all processes, in float64 and on the CPU: no device is made to wait."""
        return self.begin_sum(*values).wait()

    def begin_sum(self, *values: float, copies: int = 1) -> Summing:
        """The same, while this process does something else. All processes begin their sums in the same order."""
        total = torch.tensor(values, dtype=torch.float64)
        return Summing(total, dist.all_reduce(total, async_op=True) if self.world > 1 else None, copies)

    def sum_of_batch(self, *values: float) -> list[float]:
        """Sums what is counted once a reader of data; the stages and tensor-parallel peers all count the same."""
        return self.begin_sum_of_batch(*values).wait()

    def begin_sum_of_batch(self, *values: float) -> Summing:
        return self.begin_sum(*values, copies=self.sizes.pp * self.sizes.tp * self.sizes.cp)

    def sum_on_device(self, value: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.all_reduce(value)
        return value


def join(run: Run) -> Place:
    """Join the group that RANK, WORLD_SIZE and SHOAL_RENDEZVOUS (or torchrun's MASTER_*) describe."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if run.resources.bind and (share := cores.bind(run.resources.device == "cuda", local_rank, _processes_here())):
        print(f"shoal: bound to {share}", flush=True)
    device = _device(run, local_rank)
    if world == 1:
        return Place(rank, world, device)
    if not dist.is_initialized():
        _meet(rank, world, device)
    return lay_out(rank, world, device, Sizes.of(run.mesh), run.model.experts is not None)


def _meet(rank: int, world: int, device: torch.device) -> None:
    raise_open_files()
    if world > _processes_here() and ways.ADDRESS not in os.environ and (master := os.environ.get("MASTER_ADDR")):
        os.environ.update(ways.settings(ways.own_address(master)))  # torchrun's; our own agents have said it
    # Connections of gloo are made when they are first used: those of a ring, not one to every process.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    address = os.environ.get("SHOAL_RENDEZVOUS", "env://")
    way: dict[str, Any] = {"init_method": address} if address.startswith("file:") else {"store": _store(rank, world)}
    # With its device named NCCL's communicator of all processes is made here, and those of axes are split from it.
    bound = device if device.type == "cuda" else None
    dist.init_process_group(_backend(device), rank=rank, world_size=world, timeout=JOIN_TIMEOUT, device_id=bound, **way)


def raise_open_files() -> None:
    """As many files and sockets as the system allows this process, not as few as it begins with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS says "unlimited" and means less
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _store(rank: int, world: int) -> dist.Store:
    """Of our own agents, at the socket that rank 0 was handed; or torchrun's, with a part of its own for each restart:
    torch 2.13 would find the addresses of the dead there."""
    if "SHOAL_RENDEZVOUS" in os.environ:
        host, port, listening = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "SHOAL_LISTENING"))
        socket = None if listening is None else int(listening)
        return dist.TCPStore(str(host), int(port or 0), world, rank == 0, JOIN_TIMEOUT, master_listen_fd=socket)
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def lay_out(rank: int, world: int, device: torch.device, sizes: Sizes, experts: bool = False) -> Place:
    """The place of a process that has joined, with the meshes of its axes. Collective.

    Three meshes over the same ranks instead of one that is flattened: FSDP2 wants its axis and tensor parallelism's in
    one mesh, experts want them cut otherwise, and attention over a shared sequence needs a group alone.
    """
    if world == 1:
        return Place(rank, world, device)
    pp, copies, shard, cp, tp, ep = (getattr(sizes, name) for name in Sizes.__dataclass_fields__)
    groups = Groups(rank, world, device)
    dense = groups.mesh({"pp": pp, "replicate": copies, "shard": shard * cp, "tp": tp})
    context = groups.axis("cp", cp, tp) if cp > 1 else None
    expert = None
    if experts:
        cut = {"pp": pp, "replicate": copies, "shard": shard * cp * tp // ep, "ep": ep}
        expert = groups.mesh(cut, known={"pp": dense.get_group("pp")})
    return Place(rank, world, device, sizes, dense, context, expert)


def _backend(device: torch.device) -> str:
    # Host numbers travel by gloo even beside NCCL, so that counting tokens never synchronises a GPU.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def leave(place: Place) -> None:
    """End together: leaving without a barrier aborts a process in 1 of 20 runs (gloo teardown race). A sum over gloo is
    one: torch's own would be NCCL's, and no GPU has to take part in this."""
    if dist.is_initialized():  # also alone, where an engine wants a group
        if place.world > 1:
            place.sum(0.0)
        dist.destroy_process_group()


def gpu_shared(place: Place) -> str | None:
    """What is told of processes that share a GPU; None where each has its own."""
    gpus, here = torch.cuda.device_count(), _processes_here()
    return shared_gpu.sentence(here, gpus) if place.device.type == "cuda" and here > gpus else None


def _processes_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _device(run: Run, local_rank: int) -> torch.device:
    if run.resources.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SetupError("resources.device is cuda but this torch sees no GPU: check the driver, or set it to cpu.")
    gpus = torch.cuda.device_count()
    if shared_gpu.sharing() and max(local_rank + 1, _processes_here()) > gpus:
        os.environ.update(shared_gpu.settings(int(os.environ.get("RANK", "0"))))
        local_rank %= gpus
    if local_rank >= gpus:
        raise SetupError(f"process {local_rank} has no GPU of its own ({gpus} are visible): lower resources.processes.")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
