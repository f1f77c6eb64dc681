"""Whole tensors, dealt out: each process has some of them on its CPU, and nobody has the model.

Pieces of ZeRO are ranges of flat buffers, which no layout of a checkpoint describes, and other numbers of processes cut
them elsewhere. So what is saved are whole tensors: one after the other is gathered, and kept by the process that will
write it. The way back is the same: whoever has it sends it to all, and each takes its piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.parallel.place import Place


def dealt(shapes: Mapping[str, torch.Size], world: int) -> dict[str, int]:
    """Of each tensor the process that has it: the largest first, each to the one with the least so far."""
    load, owners = [0] * world, {}
    for name in sorted(shapes, key=lambda name: (-shapes[name].numel(), name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += shapes[name].numel()
    return {name: owners[name] for name in shapes}


def gather(owners: Mapping[str, int], place: Place, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """This process's share. Collective."""
    mine = {}
    for name, owner in owners.items():
        whole = get(name)
        if owner == place.rank:
            mine[name] = whole.detach().to("cpu", copy=True).contiguous()
        del whole  # before the next one comes
    return mine


def spread(
    owners: Mapping[str, int],
    shapes: Mapping[str, torch.Size],
    place: Place,
    mine: Mapping[str, Tensor],
    put: Callable[[str, Tensor], None],
) -> None:
    """Every tensor to all, from the process that has it. Collective."""
    for name, owner in owners.items():
        whole = mine[name].to(place.device) if owner == place.rank else torch.empty(shapes[name], device=place.device)
        if place.world > 1:
            dist.broadcast(whole, owner)
        put(name, whole)
