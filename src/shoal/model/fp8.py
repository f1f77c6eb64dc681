"""Matrix products in 8 bits: a scale for each tensor, found anew each time from its largest number.

Forwards both factors are e4m3, which has more digits; gradients are e5m2, which has more range. Products are summed in
float32 and come out in bfloat16, and the weights, their gradients and the optimizer are what they are without it.
Hopper multiplies 8-bit factors only where the summed axis lies contiguous in both, so the gradients need transposed
copies, which are written with the cast: what the backward pass keeps of an input is one byte a number.

The embedding, norms, attention itself, routers and experts stay as they are: they are no products of this kind. The
output layer is in `shoal.model.head8`; a scale for each row instead is in `shoal.model.fp8_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal import kernels
from shoal.devices.on_torch import refuse_without_e4m3fn
from shoal.model.attention import Attention, project
from shoal.model.decoder import Block, Decoder
from shoal.model.feed_forward import FeedForward, widen
from shoal.model.head import summed_cross_entropy
from shoal.spec.eight_bits import check

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 1e-12  # what is all zeros stays so


# Bound by `apply`: no import when compiled.
cast_joined: Callable[[list[Tensor], list[Tensor], torch.dtype, int], tuple[Tensor, Tensor]]


def apply(decoder: Decoder, device: torch.device, head: bool, scaling: Literal["tensor", "row"] = "tensor") -> None:
    """Every product of the dense blocks in 8 bits, and those of the head if wanted (one scale a tensor always: that of
    its gradient is known). Before recomputation and compiling."""
    refuse_without_e4m3fn(device)
    check(decoder.shape, tensor_parallel=any(isinstance(p, DTensor) for p in decoder.parameters()))
    global cast_joined
    if kernels.fit(()):
        from shoal.kernels.cast import cast_joined
    join, spread = _project, _widen
    linear: type[nn.Linear] = Linear8
    if scaling == "row":
        from shoal.model import fp8_rows

        fp8_rows.bind()
        join, spread, linear = fp8_rows.project, fp8_rows.widen, fp8_rows.RowLinear8
    for block in decoder.blocks.values():
        assert isinstance(block, Block)
        attention, ffn = block.mixer, block.ffn
        assert isinstance(attention, Attention), "shoal.spec.eight_bits lets no other mixer pass"
        # The same function and class in every block: what is compiled for one then serves all.
        attention.project = join
        attention.out.__class__ = linear
        if isinstance(ffn, FeedForward):
            ffn.widen = spread
            ffn.down.__class__ = linear
    if head and decoder.last:
        from shoal.model import head8

        decoder.head.loss = head8.summed_cross_entropy


@contextmanager
def paused(decoders: Iterable[Decoder]) -> Iterator[None]:
    """Every product that `apply` has put into 8 bits as it was before; no gradient is to be taken meanwhile."""
    from shoal.model import head8

    kept: list[Callable[[], None]] = []
    for decoder in decoders:
        for block in decoder.blocks.values():
            assert isinstance(block, Block)
            attention, ffn = block.mixer, block.ffn
            assert isinstance(attention, Attention)
            kept += [_swap(attention, "project", project), _swap(attention.out, "__class__", nn.Linear)]
            if isinstance(ffn, FeedForward):
                kept += [_swap(ffn, "widen", widen), _swap(ffn.down, "__class__", nn.Linear)]
        if decoder.last and decoder.head.loss is head8.summed_cross_entropy:
            kept.append(_swap(decoder.head, "loss", summed_cross_entropy))
    try:
        yield
    finally:
        for restore in kept:
            restore()


def _swap(owner: nn.Module, name: str, value: object) -> Callable[[], None]:
    """Returns what undoes it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


class Linear8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return products(_Products, x, self)[0]


def _project(attention: Attention, x: Tensor) -> list[Tensor]:
    return products(_Products, x, attention.q, attention.k, attention.v)


def _widen(ffn: FeedForward, x: Tensor) -> list[Tensor]:
    return products(_Products, x, ffn.gate, ffn.up)


def products(way: type[torch.autograd.Function], x: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """One input for all, which is cast once."""
    flat = x.flatten(0, -2).to(torch.bfloat16)
    results = way.apply(flat, *(one.weight for one in linears))
    return [_with_bias(y.unflatten(0, x.shape[:-1]), one) for y, one in zip(results, linears, strict=True)]


def _with_bias(y: Tensor, linear: nn.Linear) -> Tensor:
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


class _Products(torch.autograd.Function):
    """x [tokens, in] times each of the weights [out, in]: [tokens, out] each.

    Backwards the results' gradients lie side by side, and so do the weights: the input's gradient is one product, which
    adds them up as it goes, where it would be as many results to write and to read again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        x8, x8t, x_scale = cast(x, _largest(x), FORWARD)
        scales = [_scale(_largest(weight), FORWARD) for weight in weights]
        w8, w8t = _joined(list(weights), scales, FORWARD, 0)
        ctx.save_for_backward(x8t, x_scale, w8t, *scales)
        ctx.dtype = weights[0].dtype
        parts = w8.split([weight.shape[0] for weight in weights])
        return tuple(multiply(x8, part, x_scale, s, rough=True) for part, s in zip(parts, scales, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x8t, x_scale, w8t, *w_scales = ctx.saved_tensors
        # In a sum of products each must carry the same scale: what a weight's has more, its gradient's has less. Range
        # is what e5m2 has enough of.
        both = torch.stack([_scale(_largest(g), GRADIENT) * s for g, s in zip(grads, w_scales, strict=True)]).amin()
        scales = [both / s for s in w_scales]
        g8, g8t = _joined(list(grads), scales, GRADIENT, 1)
        grad_x = multiply(g8, w8t, both, torch.ones_like(both))
        parts = g8t.split([grad.shape[1] for grad in grads])
        return grad_x, *(multiply(g, x8t, s, x_scale, out=ctx.dtype) for g, s in zip(parts, scales, strict=True))


def multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, rough: bool = False, out: torch.dtype = torch.bfloat16
) -> Tensor:
    """a [m, k] times b [n, k] transposed, both 8 bits. `rough` sums in the tensor cores' own precision."""
    if not a.is_cuda:
        return ((a.float() @ b.float().t()) * (a_scale.reciprocal() * b_scale.reciprocal())).to(out)
    scales = {"scale_a": a_scale.reciprocal(), "scale_b": b_scale.reciprocal()}
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=out, use_fast_accum=rough)


def cast(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`x` in 8 bits, its transpose, and the scale that both carry, which makes `largest` the type's own."""
    scale = _scale(largest, dtype)
    return *_joined([x], [scale], dtype, 0), scale


def _largest(x: Tensor) -> Tensor:
    """Along the rows first: the compiler does that while it makes the row."""
    return x.abs().amax(-1).amax()


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.finfo(dtype).max / largest.float().clamp(min=TINY)


def _joined(pieces: list[Tensor], scales: list[Tensor], dtype: torch.dtype, along: int) -> tuple[Tensor, Tensor]:
    """Put together along an axis, each times its scale, in 8 bits; and the transpose of that."""
    if kernels.fit(pieces):
        return cast_joined(pieces, scales, dtype, along)
    most = torch.finfo(dtype).max
    scaled = [(x.float() * s).clamp(-most, most) for x, s in zip(pieces, scales, strict=True)]
    joined = torch.cat(scaled, along).to(dtype)
    return joined, joined.t().contiguous()
