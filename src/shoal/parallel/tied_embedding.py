"""A tied embedding in a pipeline: the first stage looks words up in it, the last one multiplies by it.

Both stages hold the matrix. Each has the gradient of its own use, and what the optimizer must see is their sum.

    two processes  both add the other's gradient to their own and make the same update: the copies stay equal to the
                   last bit, and no weights travel
    one process    (zbv: the first stage and the last) the last stage's copy is none of the optimizer's parameters; its
                   gradient is added to the first's, and after the update it is filled from the first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.model.decoder import Decoder
from shoal.parallel.clip import local
from shoal.parallel.place import Place

NAME = "embed.weight"


@dataclass(frozen=True)
class Tied:
    weight: Tensor  # this process's, which the optimizer updates
    local_copy: Tensor | None  # the last stage's, where the first stage is here as well
    peer: int | None  # rank of the process with the other use; None where both are here
    group: dist.ProcessGroup | None
    borrowed: bool  # the weight here is the last stage's copy: the first stage's process saves it and counts it

    @staticmethod
    def of(decoders: Sequence[Decoder], place: Place) -> Tied | None:
        """None where nothing here is tied to another stage: untied models, middle stages, no pipeline."""
        first = next((d for d in decoders if d.first), None)
        last = next((d for d in decoders if d.last), None)
        owner = first or last
        if owner is None or first is last or not owner.shape.tie_embeddings:
            return None
        if first is not None and last is not None:
            return Tied(first.embed.weight, last.embed.weight, None, None, borrowed=False)
        assert place.dense is not None
        group = place.dense.get_group("pp")
        peer = dist.get_global_rank(group, place.sizes.pp - 1 if first is not None else 0)
        return Tied(owner.embed.weight, None, peer, group, borrowed=first is None)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Once a step, before the gradients are clipped. Every process of the first and the last stage calls it."""
        mine = _gradient(self.weight)
        if self.local_copy is not None:
            mine += _gradient(self.local_copy)
            self.local_copy.grad = None
            return
        # Each adds the other's to its own: x + y is y + x to the last bit, so both have the same sum.
        assert self.peer is not None
        theirs = torch.empty_like(mine)
        if mine.numel() == 0:  # a shard of a small matrix may be empty; it then is on both
            return
        ops = [
            dist.P2POp(dist.isend, mine.contiguous(), self.peer, self.group),
            dist.P2POp(dist.irecv, theirs, self.peer, self.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        mine += theirs

    @torch.no_grad()
    def spread(self) -> None:
        """After an update and after a restore: fills the local copy. Copies of two processes are equal by then."""
        if self.local_copy is not None:
            local(self.local_copy).copy_(local(self.weight))


def _gradient(weight: Tensor) -> Tensor:
    """This process's part of a gradient, laid out as the weight is, to be changed in place."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    grad = weight.grad
    if isinstance(weight, DTensor) and isinstance(grad, DTensor) and grad.placements != weight.placements:
        # Partial sums of the two uses may be cut differently; cut as the weight is, they match number by number.
        grad = weight.grad = grad.redistribute(placements=weight.placements)
    return local(grad)
