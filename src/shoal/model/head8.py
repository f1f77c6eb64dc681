"""The loss with the output layer in 8 bits: hidden states and weight in e4m3, the logits' gradient in e5m2.

That gradient is softmax minus one-hot, never above 1 and with a vocabulary of 128k mostly below 1e-5: one fixed scale
holds all of it, so nothing has to look for the largest number, and the kernel that makes it writes it in 8 bits, as it
is and transposed. Logits come out of the product in bfloat16, and the weight's gradient is added up in float32.

The tokens go in groups, whose gradient is held in 8 bits, transposed, for one product that gives the weight's: as many
bytes as the logits of half of them in bfloat16. Inside a group they go in parts, whose logits are there at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import kernels
from shoal.model.fp8 import FORWARD, GRADIENT, cast, multiply
from shoal.model.head import chunk_tokens, cross_entropy, recorded, scaled_grads
from shoal.spec.eight_bits import ALIGN

SCALE = 2.0**15  # the largest is then below e5m2's 57,344, and numbers down to 5e-10 are not yet zero
PARTS = 8  # of a group


def summed_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What `shoal.model.head.summed_cross_entropy` gives, from products in 8 bits."""
    hidden, weight = recorded(hidden.flatten(0, -2).to(torch.bfloat16), weight)
    with torch.autocast(hidden.device.type, enabled=False):
        return _SummedCrossEntropy8.apply(hidden, weight, targets.flatten(), 2 * chunk_tokens(weight) // ALIGN * ALIGN)


class _SummedCrossEntropy8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, group: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wanted = wants_hidden or wants_weight
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        scale = torch.full_like(total, SCALE)
        w8, w8t, w_scale = _cast(weight)
        for start in range(0, hidden.shape[0], group):
            h8, h8t, h_scale = _cast(hidden[start : start + group])
            tokens = h8.shape[0]
            held = tokens if wanted else 0
            slopes_t = torch.empty(weight.shape[0], held, dtype=GRADIENT, device=hidden.device)
            part = -(-tokens // PARTS // ALIGN) * ALIGN
            for at in range(0, tokens, part):
                here, rows = slice(at, at + part), slice(start + at, min(start + at + part, start + tokens))
                logits = multiply(h8[here], w8, h_scale, w_scale, rough=True)
                losses, slopes = _slopes(logits, targets[rows], slopes_t[:, here], wanted)
                del logits
                total += losses.sum()
                if grad_hidden is not None and slopes is not None:
                    grad_hidden[rows] = multiply(slopes, w8t, scale, w_scale)
                del slopes
            if wants_weight and grad_weight is None:
                grad_weight = multiply(slopes_t, h8t, scale, h_scale, out=torch.float32)
            elif grad_weight is not None:
                grad_weight += multiply(slopes_t, h8t, scale, h_scale)
            del slopes_t
        ctx.grads = grad_hidden, grad_weight
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        return *scaled_grads(ctx, grad), None, None


def _cast(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Not compiled: one reading, where abs and amax are two and a copy.
    return cast(x, torch.linalg.vector_norm(x, float("inf")), FORWARD)


def _slopes(logits: Tensor, targets: Tensor, transposed: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Losses of each row and, if wanted, their gradient times SCALE in 8 bits; `transposed` is filled with it too."""
    if wanted and kernels.fit((logits,)):
        from shoal.kernels.cross_entropy import cross_entropy_8

        return cross_entropy_8(logits, targets, SCALE, GRADIENT, transposed)
    losses, slopes = cross_entropy(logits.float() if wanted else logits, targets, wanted)
    if slopes is None:
        return losses, None
    slopes = (slopes * SCALE).to(GRADIENT)
    transposed.copy_(slopes.t())
    return losses, slopes
