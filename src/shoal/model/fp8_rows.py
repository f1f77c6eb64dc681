"""Matrix products in 8 bits with a scale for each row: an outlier costs its own row digits, not the whole tensor.

A product sums over one axis of each factor, and its scales may differ along the other. So every factor is cast twice:
forwards the input has a scale for each token and a weight one for each output; for the input's gradient the results'
gradients have one for each token and the weights one for each input; for the weights' gradients it is each output and
each input. All are e4m3: with a scale of its own a row of gradients has no need of e5m2's range.

The price is one reading more of each factor: where a tensor's largest number is found as its rows are made, a column's
is known only after the last row (`shoal.kernels.cast_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal import kernels
from shoal.model.attention import Attention
from shoal.model.feed_forward import FeedForward
from shoal.model.fp8 import FORWARD, TINY, products

MOST = torch.finfo(FORWARD).max

# Bound by `bind`: no import when compiled.
largest_joined: Callable[[list[Tensor], int], tuple[Tensor, Tensor]]
cast_joined_by_rows: Callable[[list[Tensor], Tensor, Tensor, torch.dtype, int], tuple[Tensor, Tensor]]


def bind() -> None:
    global largest_joined, cast_joined_by_rows
    if kernels.fit(()):
        from shoal.kernels.cast_rows import cast_joined_by_rows, largest_joined


class RowLinear8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return products(_RowProducts, x, self)[0]


def project(attention: Attention, x: Tensor) -> list[Tensor]:
    return products(_RowProducts, x, attention.q, attention.k, attention.v)


def widen(ffn: FeedForward, x: Tensor) -> list[Tensor]:
    return products(_RowProducts, x, ffn.gate, ffn.up)


class _RowProducts(torch.autograd.Function):
    """x [tokens, in] times each of the weights [out, in]: [tokens, out] each.

    Backwards all lie side by side, as with one scale a tensor; so do the weights' gradients, whose rows have scales of
    their own anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        x8, x8t, by_token, x_by_input = cast([x], 0)
        w8, w8t, by_output, w_by_input = cast(list(weights), 0)
        ctx.save_for_backward(x8t, x_by_input, w8t, w_by_input)
        ctx.outputs, ctx.dtype = [weight.shape[0] for weight in weights], weights[0].dtype
        parts = zip(w8.split(ctx.outputs), by_output.split(ctx.outputs), strict=True)
        return tuple(multiply(x8, part, by_token, units, rough=True) for part, units in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x8t, x_by_input, w8t, w_by_input = ctx.saved_tensors
        g8, g8t, by_token, by_output = cast(list(grads), 1)
        grad_x = multiply(g8, w8t, by_token, w_by_input)
        grad_w = multiply(g8t, x8t, by_output, x_by_input)
        return grad_x, *(part.to(ctx.dtype) for part in grad_w.split(ctx.outputs))


def multiply(a: Tensor, b: Tensor, a_units: Tensor, b_units: Tensor, rough: bool = False) -> Tensor:
    """a [m, k] times b [n, k] transposed, both 8 bits, in bfloat16; units [m] and [n] are what a 1 of each row stands
    for. `rough` sums in the tensor cores' own precision.

    Without `rough` this is as fast as with one scale a tensor where cuBLAS has it (CUDA 12.9, Hopper); elsewhere torch
    takes a kernel of CUTLASS, which is slow at it (pytorch/pytorch#147971) and gives no float32.
    """
    if not a.is_cuda:
        return ((a.float() @ b.float().t()) * a_units[:, None] * b_units).to(torch.bfloat16)
    units = {"scale_a": a_units[:, None], "scale_b": b_units[None]}
    return torch._scaled_mm(a, b.t(), **units, out_dtype=torch.bfloat16, use_fast_accum=rough)


def cast(pieces: list[Tensor], along: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pieces put together along an axis, in 8 bits by rows; the transpose of them by columns, which are its rows;
    and what a 1 stands for in each row of the one and of the other."""
    fit = kernels.fit(pieces)
    largest = largest_joined(pieces, along) if fit else _largest(pieces, along)
    by_row, by_column = (MOST / found.clamp(min=TINY) for found in largest)
    if fit:
        eight, transposed = cast_joined_by_rows(pieces, by_row, by_column, FORWARD, along)
    else:
        eight, transposed = _narrow(pieces, by_row, by_column, along)
    return eight, transposed, by_row.reciprocal(), by_column.reciprocal()


def _largest(pieces: list[Tensor], along: int) -> tuple[Tensor, Tensor]:
    joined = torch.cat(pieces, along).abs()
    return joined.amax(1).float(), joined.amax(0).float()


def _narrow(pieces: list[Tensor], by_row: Tensor, by_column: Tensor, along: int) -> tuple[Tensor, Tensor]:
    joined = torch.cat(pieces, along).float()
    rows, columns = ((joined * by).clamp(-MOST, MOST).to(FORWARD) for by in (by_row[:, None], by_column))
    return rows, columns.t().contiguous()
