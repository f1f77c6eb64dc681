"""A model's weights as one flat float32 vector in host memory, and back: what peers of a swarm have in common.

The order is that of `named_parameters`, and tensors are whole, so that peers whose meshes differ have the same vector.
Over several processes the first one has the vector; the others take part in the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from shoal.errors import SpecError
from shoal.parallel.laid import Laid
from shoal.swarm.outer.exact import F32
from shoal.swarm.outer.peer_side import Move


class Weights:
    def __init__(self, model: Laid) -> None:
        if model.pipeline is not None:
            raise SpecError("a peer of a swarm cannot have a pipeline inside (mesh.pp): use dp_shard or tp instead.")
        self._model, self._place = model, model.place
        self._parameters = [p for _, p in model.named_parameters()]
        self._sizes = [p.numel() for p in self._parameters]
        self.count = sum(self._sizes)

    @property
    def _first(self) -> bool:
        return self._place.rank == 0

    @torch.no_grad()
    def read(self) -> F32:
        """A copy; on other processes than the first an empty one. Collective."""
        into = np.empty(self.count if self._first else 0, np.float32)
        at = 0
        for p, size in zip(self._parameters, self._sizes, strict=True):
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            if self._first:
                torch.from_numpy(into[at : at + size]).copy_(whole.detach().reshape(-1))
            at += size
        return into

    def write(self, vector: F32) -> None:
        """Collective."""
        self._spread(vector, lambda p, new: p.copy_(new))

    def add(self, moves: Iterable[Move]) -> None:
        """Collective."""
        total = np.zeros(self.count if self._first else 0, np.float32)
        for where, by in moves if self._first else ():
            total[where] += by
        self._spread(total, lambda p, by: p.add_(by))

    @torch.no_grad()
    def _spread(self, vector: F32, put: Callable[[Tensor, Tensor], object]) -> None:
        at = 0
        for p, size in zip(self._parameters, self._sizes, strict=True):
            mine = torch.from_numpy(vector[at : at + size]).view(p.shape) if self._first else None
            whole = torch.empty(p.shape, device=self._place.device) if mine is None else mine.to(self._place.device)
            if self._place.world > 1:
                whole = whole.contiguous()
                dist.broadcast(whole, src=0)
            if isinstance(p, DTensor):
                put(p.to_local(), distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local())
            else:
                put(p, whole)
            at += size
        self._model.spread()
