"""The gradients of this rank as one flat vector in host memory, and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.parallel.clip import local


class Flat:
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sizes = [local(p).numel() for p in self._parameters]
        self.count = sum(self._sizes)

    def empty(self) -> Tensor:
        return torch.empty(self.count)

    def gather(self, into: Tensor) -> Tensor:
        """Collective over the ranks of the island."""
        for p, part in zip(self._parameters, self.parts(into), strict=True):
            if p.grad is None:
                part.zero_()
            else:
                part.copy_(local(_as_laid_out(p)).reshape(-1))
        return into

    def parts(self, total: Tensor) -> list[Tensor]:
        """Of such a vector, that of each parameter."""
        return list(total.split(self._sizes))

    def install(self, total: Tensor) -> None:
        """As the gradients of the parameters, whatever they were."""
        for p, part in zip(self._parameters, self.parts(total), strict=True):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            local(p.grad).copy_(part.view(local(p.grad).shape))

    def forget(self) -> None:
        for p in self._parameters:
            p.grad = None


def _as_laid_out(p: nn.Parameter) -> Tensor:
    """The gradient laid out as its parameter is: tensor parallelism leaves some as parts that are yet to be summed."""
    assert p.grad is not None
    if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        return p.grad.redistribute(p.device_mesh, p.placements)
    return p.grad
