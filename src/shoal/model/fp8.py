"""Matrix products in 8 bits: a scale for each tensor, found anew each time from its largest number.

Forwards both factors are e4m3, which has more digits; gradients are e5m2, which has more range. Products are summed in
float32 and come out in bfloat16, and the weights, their gradients and the optimizer are what they are without it.
Hopper multiplies 8-bit factors only where the summed axis lies contiguous in both, so the gradients need transposed
copies, which are written with the cast: what the backward pass keeps of an input is one byte a number.

The embedding, the head, norms, attention itself, routers and experts stay as they are: the first two are where 8 bits
are known to cost quality, the rest are no products of this kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal import kernels
from shoal.errors import SetupError
from shoal.model.attention import Attention
from shoal.model.decoder import Block, Decoder
from shoal.model.feed_forward import FeedForward
from shoal.spec.eight_bits import check

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
SINCE = (8, 9)  # the first GPUs that multiply 8 bits
TINY = 1e-12  # what is all zeros stays so


cast_both: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]  # bound by `apply`: no import when compiled


def apply(decoder: Decoder, device: torch.device) -> None:
    """Every product of the dense blocks in 8 bits. Before recomputation and compiling."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < SINCE:
        raise SetupError(
            f"train.precision fp8 needs a GPU with 8-bit products (L40S, RTX 4090, H100 and newer), which "
            f"{torch.cuda.get_device_name(device)} is not: take bf16."
        )
    check(decoder.shape, tensor_parallel=any(isinstance(p, DTensor) for p in decoder.parameters()))
    global cast_both
    if kernels.fit(()):
        from shoal.kernels.cast import cast_both
    for block in decoder.blocks.values():
        assert isinstance(block, Block)
        attention, ffn = block.attention, block.ffn
        # The same function and class in every block: what is compiled for one then serves all.
        attention.project = _project
        attention.out.__class__ = Linear8
        if isinstance(ffn, FeedForward):
            ffn.widen = _widen
            ffn.down.__class__ = Linear8


class Linear8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _products(x, self)[0]


def _project(attention: Attention, x: Tensor) -> list[Tensor]:
    return _products(x, attention.q, attention.k, attention.v)


def _widen(ffn: FeedForward, x: Tensor) -> list[Tensor]:
    return _products(x, ffn.gate, ffn.up)


def _products(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """One input for all, which is cast once. Joining the weights as well was slower: the compiler then writes their
    gradients with a strided kernel at half the bandwidth."""
    flat = x.flatten(0, -2).to(torch.bfloat16)
    results = _Products.apply(flat, *(one.weight for one in linears))
    return [_with_bias(y.unflatten(0, x.shape[:-1]), one) for y, one in zip(results, linears, strict=True)]


def _with_bias(y: Tensor, linear: nn.Linear) -> Tensor:
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


class _Products(torch.autograd.Function):
    """x [tokens, in] times each of the weights [out, in]: [tokens, out] each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        x8, x8t, x_scale = _cast(x, FORWARD)
        casts = [_cast(weight, FORWARD) for weight in weights]
        ctx.save_for_backward(x8t, x_scale, *(w8t for _, w8t, _ in casts), *(scale for _, _, scale in casts))
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(multiply(x8, w8, x_scale, scale, rough=True) for w8, _, scale in casts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x8t, x_scale, *rest = ctx.saved_tensors
        grad_x: Tensor | None = None
        grad_weights = []
        for grad, w8t, w_scale, dtype in zip(grads, rest[: len(grads)], rest[len(grads) :], ctx.dtypes, strict=True):
            g8, g8t, g_scale = _cast(grad, GRADIENT)
            part = multiply(g8, w8t, g_scale, w_scale)
            grad_x = part if grad_x is None else grad_x + part
            grad_weights.append(multiply(g8t, x8t, g_scale, x_scale).to(dtype))
        assert grad_x is not None
        return grad_x, *grad_weights


def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, rough: bool = False) -> Tensor:
    """a [m, k] times b [n, k] transposed, both 8 bits, in bfloat16. `rough` sums in the tensor cores' own precision."""
    if not a.is_cuda:
        return ((a.float() @ b.float().t()) * (a_scale.reciprocal() * b_scale.reciprocal())).to(torch.bfloat16)
    scales = {"scale_a": a_scale.reciprocal(), "scale_b": b_scale.reciprocal()}
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=rough)


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`x` in 8 bits, its transpose, and the scale that both carry."""
    # Along the rows first: the compiler does that while it makes the row.
    largest = x.abs().amax(-1).amax().float()
    most = torch.finfo(dtype).max
    scale = most / largest.clamp(min=TINY)
    if kernels.fit((x,)):
        return *cast_both(x, scale, dtype), scale
    x8 = (x.float() * scale).clamp(-most, most).to(dtype)
    return x8, x8.t().contiguous(), scale
