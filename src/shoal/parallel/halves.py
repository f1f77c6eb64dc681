"""A backward pass in two halves, for zbv: the gradients of a stage's inputs at once, as the stage before waits for
them, and those of its weights later, as nobody does.

torch does the second half by running again, for their weights' sake, those autograd nodes of the first that have any.
That asks two things of a stage: its nodes must stand being run twice, and it must be worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shoal.model.decoder import Decoder
from shoal.parallel.shard import sharded_parts


def divisible(decoder: Decoder) -> bool:
    """Whether the backward pass of a stage can and should be done in two halves.

    A recomputed block would compute itself again for either half, and a compiled one is a single node that gives both
    at once. Experts that alone are sharded have their gradients taken away after the first half.
    """
    if not isinstance(decoder, FSDPModule) and sharded_parts(decoder):
        return False
    return not any("forward" in vars(b) or b._compiled_call_impl is not None for b in decoder.blocks.values())


def nothing_later() -> Callable[[], None]:
    """What remains for the second half where the first has done everything."""
    return lambda: None


def repeatable(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A head's loss whose backward can run twice.

    The head takes its gradients on the way forwards and scales them in place when they are asked for, which can be
    done once. Here nothing is scaled: a pipeline begins its backward pass with ones.
    """

    def known(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return loss(hidden, weight, targets)
        leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
        total = loss(*leaves, targets)
        return _Known.apply(hidden, weight, total.detach(), *torch.autograd.grad(total, leaves))

    return known


class _Known(torch.autograd.Function):
    """A number whose gradients are known already."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, total: Tensor, grad_hidden: Tensor, grad_weight: Tensor
    ) -> Tensor:
        ctx.grads = grad_hidden, grad_weight
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *ctx.grads, None, None, None
