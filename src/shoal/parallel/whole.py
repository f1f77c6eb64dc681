"""All weights of a model that is laid over processes, on each of them: for who computes with it in another way."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.parallel.laid import Laid


@torch.no_grad()
def whole_weights(model: Laid, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """By the names that checkpoints use, parameters in `dtype`. What one process holds alone is not copied: nobody may
    write to it. Collective."""
    trained = {name for name, _ in model.named_parameters()}
    found = {}
    for name, tensor in model.saved().items():
        kept = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = kept.to(dtype) if dtype is not None and name in trained else kept
    return _of_all_stages(model, found) if model.pipeline is not None else found


def _of_all_stages(model: Laid, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """A pipeline's processes hold other tensors: the first that has one sends it to all."""
    place = model.place
    told: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(place.world)]
    dist.all_gather_object(told, {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()})
    found = {}
    for name in sorted({name for one in told for name in one}):
        source = next(rank for rank, one in enumerate(told) if name in one)
        shape, dtype = told[source][name]
        if place.rank == source:
            whole = mine[name].to(place.device).contiguous()
        else:  # also where it has the tensor: what arrives must not be written into the model
            whole = torch.empty(shape, dtype=dtype, device=place.device)
        dist.broadcast(whole, src=source)
        found[name] = whole
    return found
