"""What every rank begins with: parameters, the state of an optimizer and any object, from one rank to all."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shoal.script.horovod.agreement import Call, announce
from shoal.script.horovod.collectives import broadcast_all_async_
from shoal.script.horovod.world import here, rank, size


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """A state_dict, named_parameters() or parameters()."""
    if isinstance(params, Mapping):
        params = [params[name] for name in sorted(params)]
    tensors = [p[1] if isinstance(p, tuple) else p for p in params]
    broadcast_all_async_([t for t in tensors if isinstance(t, torch.Tensor)], root_rank).wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Settings and state, also where other ranks have none. Nothing is stepped: Horovod itself takes a step with
    gradients of zero to make the state, and weight decay changes the weights by it."""
    packed = io.BytesIO()
    if rank() == root_rank:
        torch.save(optimizer.state_dict(), packed)
    packed = io.BytesIO(broadcast_object(packed.getvalue(), root_rank))
    if rank() != root_rank:
        optimizer.load_state_dict(torch.load(packed, map_location="cpu", weights_only=True))


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    announce(Call("broadcast_object", f"from rank {root_rank}"))
    line = [obj]
    dist.broadcast_object_list(line, root_rank, group=here().said)
    return line[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    announce(Call("allgather_object"))
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, obj, group=here().said)
    return found
