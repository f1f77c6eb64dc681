"""Products of one token with a weight, and what stands around them: bound by reading the weight once.

    y = act(norm(x) @ gate.T) * (norm(x) @ up.T)        or        y = norm(x) @ weight.T + bias + residual

At one token a layer of a model of a billion parameters takes 30 microseconds to read, and a kernel of its own 2 to
start: so the norm before a product and the sum after it are computed within. A norm's factor is one number a token and
comes after the product, so that no reading waits for it. Weights may be of 8 bits with a factor for each row.

On Hopper a kernel begins while the one before it ends, and reads its first weights, which nobody writes, meanwhile
(`early`); it waits before it reads what that one has made.

Of two tokens and more a library's product is better (H200, 8 tokens, 1B: 19 us for gate and up, and a kernel of tl.dot
30 at best): it is not tried here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shoal.devices.on_torch import begins_early

FEW_ROWS, MANY_ROWS = 2048, 65536
ACTS = {"": 0, "silu": 1, "gelu_tanh": 2}


@dataclass(frozen=True)
class Norm:
    """An RMSNorm before a product. `centred`: the weight is what it has more than one."""

    weight: Tensor
    eps: float
    centred: bool = False

    def by_torch(self, x: Tensor) -> Tensor:
        if not self.centred:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float() + 1.0, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Weight:
    """Of a product: [rows, width], and in 8 bits a factor for each row."""

    matrix: Tensor
    bias: Tensor | None = None
    factors: Tensor | None = None
    kept: Tensor | None = None
    """The same values in the type of what comes in, where they are there as well: for products of many tokens."""

    def whole(self, dtype: torch.dtype) -> Tensor:
        if self.factors is None:
            return self.matrix
        if self.kept is not None:
            return self.kept
        return (self.matrix.float() * self.factors[:, None]).to(dtype)


def product(
    x: Tensor,
    weight: Weight,
    norm: Norm | None = None,
    act: str = "",
    residual: Tensor | None = None,
    tiles: tuple[int, int, int] | None = None,
) -> Tensor:
    """x [1, width] to [1, rows]. With an `act` the weight's first half of rows is the gate, and the second what it lets
    through: to [1, rows / 2]. `tiles`: others than `tile` says, to try them."""
    tokens, width = x.shape
    assert tokens == 1
    assert x.is_contiguous()
    assert weight.matrix.is_contiguous()
    rows = weight.matrix.shape[0] // (2 if act else 1)
    y = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    block_rows, block_width, warps = tiles or tile(rows, width)
    begins_early = early(x.device)
    with torch.cuda.device_of(x):
        _one_token[(triton.cdiv(rows, block_rows),)](
            x,
            weight.matrix,
            weight.factors if weight.factors is not None else x,
            weight.bias if weight.bias is not None else x,
            norm.weight if norm is not None else x,
            residual if residual is not None else x,
            y,
            rows,
            width,
            norm.eps if norm is not None else 0.0,
            NORM=0 if norm is None else 1 + norm.centred,
            ACT=ACTS[act],
            BIAS=weight.bias is not None,
            FACTORS=weight.factors is not None,
            RESIDUAL=residual is not None,
            EVEN=width % block_width == 0 and rows % block_rows == 0,
            BLOCK_ROWS=block_rows,
            BLOCK_WIDTH=block_width,
            EARLY=begins_early,
            num_warps=warps,
            **({"launch_pdl": True} if begins_early else {}),
        )
    return y


def tile(rows: int, width: int) -> tuple[int, int, int]:
    """Rows and width of the weight that a program reads at a time, and its warps: some programs for each
    multiprocessor, each with kilobytes on their way. (The best of eight on an H200, at the shapes of 1B and 8B.)"""
    most = triton.next_power_of_2(width)
    if rows <= FEW_ROWS:
        return 2, min(2048 if width > 2 * FEW_ROWS else 1024, most), 4
    if rows >= MANY_ROWS:
        return 8, min(512, most), 2
    return 4, min(512, most), 4


@functools.cache
def early(device: torch.device) -> bool:
    """Asked once: a launch takes as long."""
    return begins_early(device)


def plain(x: Tensor, weight: Weight, norm: Norm | None = None, act: str = "", residual: Tensor | None = None) -> Tensor:
    """What `product` computes, by torch."""
    y = F.linear(norm.by_torch(x) if norm else x, weight.whole(x.dtype), weight.bias)
    if act:
        gate, up = y.chunk(2, dim=-1)
        y = (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up
    return y if residual is None else y + residual


def gated(x: Tensor, act: str) -> Tensor:
    """act(gate) * up of both side by side: [rows, 2 * width] to [rows, width]."""
    rows, width = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _gated[(rows, triton.cdiv(width, 1024))](x, y, width, ACT=ACTS[act], BLOCK=1024)
    return y


@triton.jit
def _gated(x, y, width, ACT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, (_acted(gate, ACT) * up).to(y.dtype.element_ty), mask=at < width)


@triton.jit
def _acted(gate, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACT == 1:
        return gate / (1.0 + tl.exp(-gate))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # x / 2 * (1 + tanh)


@triton.jit
def _one_token(  # type: ignore[no-untyped-def]
    x,
    w,
    factors,
    bias,
    norm,
    residual,
    y,
    rows,
    width,
    eps,
    NORM: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    FACTORS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = row < rows
    lane = tl.arange(0, BLOCK_WIDTH)
    begin = w + row[:, None].to(tl.int64) * width + lane[None, :]
    apart = rows.to(tl.int64) * width  # from a gate's row to what it lets through
    total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    other = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    squares = tl.zeros((BLOCK_WIDTH,), tl.float32)
    here = (there[:, None] & (lane < width)[None, :]) if not EVEN else True
    next_v = tl.load(begin, mask=here, other=0) if not EVEN else tl.load(begin)
    next_u = next_v
    if ACT:
        next_u = tl.load(begin + apart, mask=here, other=0) if not EVEN else tl.load(begin + apart)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for k in range(0, width, BLOCK_WIDTH):
        at = k + lane
        v = next_v.to(tl.float32)
        u = next_u.to(tl.float32)
        # The next weights are on their way while these are multiplied.
        left = (at + BLOCK_WIDTH < width)[None, :] & there[:, None] if not EVEN else k + BLOCK_WIDTH < width
        next_v = tl.load(begin + k + BLOCK_WIDTH, mask=left, other=0)
        if ACT:
            next_u = tl.load(begin + apart + k + BLOCK_WIDTH, mask=left, other=0)
        if EVEN:
            xs = tl.load(x + at).to(tl.float32)
        else:
            xs = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
        if NORM:
            squares += xs * xs
            if EVEN:
                n = tl.load(norm + at).to(tl.float32)
            else:
                n = tl.load(norm + at, mask=at < width, other=0.0).to(tl.float32)
            if NORM == 2:
                n += 1.0
            xs *= n
        total += v * xs[None, :]
        if ACT:
            other += u * xs[None, :]
    out = tl.sum(total, axis=1)
    up = tl.sum(other, axis=1)
    if FACTORS:
        out *= tl.load(factors + row, mask=there, other=0.0)
        if ACT:
            up *= tl.load(factors + rows + row, mask=there, other=0.0)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
        out *= scale
        up *= scale
    if BIAS:
        out += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
        if ACT:
            up += tl.load(bias + rows + row, mask=there, other=0.0).to(tl.float32)
    if ACT:
        out = _acted(out, ACT) * up
    if RESIDUAL:
        out = out.to(y.dtype.element_ty).to(tl.float32)
        out += tl.load(residual + row, mask=there, other=0.0).to(tl.float32)
    tl.store(y + row, out.to(y.dtype.element_ty), mask=there)
