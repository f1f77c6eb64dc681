"""The output head: hidden states to logits, or straight to the loss without holding all the logits.

With a vocabulary of 128k the logits of 8k tokens are 4 GiB in float32, and as much again for their gradient: more
than the rest of a step. The loss therefore goes over the tokens in chunks and takes each chunk's gradient while its
logits are there, as nothing later changes it but a factor. Nothing is computed twice; recomputing the logits in the
backward pass instead costs a third of the head's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import kernels
from shoal.spec.shape import Shape

NO_TARGET = -100
CPU_CHUNK_BYTES = 64 << 20
GPU_CHUNK_BYTES = 4 << 30  # larger, as each chunk also adds a whole weight gradient


class Head(nn.Module):
    """Owns the output matrix, or none when the embedding is tied: a shared parameter would be named, saved and
    counted twice, and `to_empty` would untie it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight: nn.Parameter | None
        if shape.tie_embeddings:
            self.register_parameter("weight", None)
        else:
            self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.dim))
        self.logits: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.loss: Callable[..., Tensor] = summed_cross_entropy
        self.z_loss = 0.0  # `train.z_loss`

    def forward(self, hidden: Tensor, tied: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, vocab]; with targets [batch, seq], the sum of cross-entropy over them (float32)."""
        weight = self.weight if tied is None else tied
        assert weight is not None
        if targets is None:
            return self.logits(hidden, weight)
        return self.loss(hidden, weight, targets, self.z_loss) if self.z_loss else self.loss(hidden, weight, targets)


def summed_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Sum of cross-entropy of `hidden @ weight.T` [..., vocab] over the targets [...] that are not NO_TARGET.

    With `z_loss` the gradient is that of this sum and so many times the sum of squared logsumexps of the same targets
    (Chowdhery et al., 2022), which keeps logits from growing together; the number stays the cross-entropy alone.
    """
    hidden, weight = recorded(hidden.flatten(0, -2), weight)
    hidden = as_computed(hidden)  # the weight is cast inside: its gradient is made in float32, and stays so
    with torch.autocast(hidden.device.type, enabled=False):
        return _SummedCrossEntropy.apply(hidden, weight, targets.flatten(), chunk_tokens(weight), z_loss)


def recorded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Without their gradients where none are recorded: a Function is told of gradients that nobody will ask for."""
    return tensors if torch.is_grad_enabled() else tuple(t.detach() for t in tensors)


def as_computed(tensor: Tensor) -> Tensor:
    """In the type that F.linear would compute in."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def chunk_tokens(weight: Tensor) -> int:
    """Tokens whose logits of `weight` [rows, dim] are held at a time."""
    limit = CPU_CHUNK_BYTES if weight.device.type == "cpu" else GPU_CHUNK_BYTES
    tokens = limit // (4 * weight.shape[0])
    return max(128, tokens // 1024 * 1024 or tokens)  # whole tiles of a product


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, z_loss: float) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        ctx.weight_dtype = weight.dtype
        weight = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            h = hidden[rows]  # [chunk, dim]
            losses, slope = cross_entropy(h @ weight.t(), targets[rows], wants_hidden or wants_weight, z_loss)
            total += losses.sum()
            if slope is not None and grad_hidden is not None:
                torch.matmul(slope, weight, out=grad_hidden[rows])
            if slope is not None and wants_weight:
                grad_weight = add_product(grad_weight, slope.t(), h)
        ctx.grads = grad_hidden, grad_weight
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        return *scaled_grads(ctx, grad), None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, wants_slope: bool, z_loss: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Of each row of `logits` [tokens, vocab], which it uses up, and if wanted the gradient of the sum (and of the
    z-loss)."""
    if kernels.fit((logits,)):
        from shoal.kernels.cross_entropy import cross_entropy_

        losses = cross_entropy_(logits, targets, wants_slope, z_loss)
        return losses, logits if wants_slope else None
    counts, picked = targets[:, None] >= 0, targets[:, None].clamp(min=0)
    totals = logits.float().logsumexp(-1, keepdim=True) if wants_slope and z_loss else None
    log_p, dtype = F.log_softmax(logits, dim=-1, dtype=torch.float32), logits.dtype
    del logits  # as large again
    losses = -(log_p.gather(1, picked) * counts)[:, 0]
    if not wants_slope:
        return losses, None
    # d loss / d logits = softmax - one_hot, and of a squared logsumexp twice itself times softmax
    soft = log_p.exp_() if totals is None else log_p.exp_().mul_(1 + 2 * z_loss * totals)
    slope = soft.scatter_add_(1, picked, -torch.ones_like(log_p[:, :1])).mul_(counts)
    return losses, slope.to(dtype)


def scaled_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients that forward has left in `ctx.grads`, times that of the loss."""
    if ctx.grads is None:
        raise RuntimeError("the gradient of this loss was taken already: compute the loss again")
    grad_hidden, grad_weight = ctx.grads
    ctx.grads = None  # they are scaled in place, which can be done once
    if grad_hidden is not None:
        grad_hidden.mul_(grad)
    if grad_weight is not None:
        grad_weight = grad_weight.mul_(grad).to(ctx.weight_dtype)
    return grad_hidden, grad_weight


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, summed in float32 whatever the factors are."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)  # no product to hold
    if a.is_cuda:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return (a @ b).float() if total is None else total.add_(a @ b)
