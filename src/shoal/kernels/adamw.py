"""AdamW that takes the clipping's factor along: the gradient is read once and never written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.rounding import Spot

BLOCK = 4096
ALIGNED_BYTES = 16  # of addresses that the kernel for many tensors may be told of

Row = tuple[Tensor, Tensor, Tensor, Tensor]  # a parameter, its gradient, its two moments


def adamw_all_(rows: Sequence[Row], factor: Tensor, spots: Sequence[Spot | None] = (), **about: Any) -> None:
    """`adamw_` of many parameters in one launch: a model sharded over many processes has hundreds of small ones, and
    each would take longer to launch than to update. Those that lie otherwise in memory go one by one. `spots`: of each,
    where moments have 16 bits."""
    by_kind: dict[tuple[bool, bool, bool], list[tuple[Row, Spot | None]]] = defaultdict(list)
    for (p, grad, m, v), spot in zip(rows, spots or [None] * len(rows), strict=True):
        if p.numel():
            row = (p, grad.contiguous(), m, v)
            by_kind[_joins(row)].append((row, spot))
    for (joins, narrow, even), some in by_kind.items():
        if joins:
            _in_one_launch(
                [row for row, _ in some],
                _fields([spot for _, spot in some], narrow, about["step"]),
                even,
                factor,
                **about,
            )
        else:
            for row, spot in some:
                adamw_(*row, factor, spot, **about)


def _fields(spots: Sequence[Spot | None], narrow: bool, step: int) -> list[list[int]]:
    """Of moments in 16 bits what `_noise` reads, a list for each of its numbers; else none."""
    if not narrow:
        return []
    rows = []
    for spot in spots:
        assert spot is not None, "16 bits are rounded by place"
        rows.append([*spot.keys(step), spot.base, spot.width, spot.rows, spot.stride, spot.plane])
    return [list(column) for column in zip(*rows, strict=True)]


def _joins(row: Row) -> tuple[bool, bool, bool]:
    """Whether a parameter can be updated with others, and with which: those whose moments have as many bits, and whose
    numbers can be read four at a time to their end."""
    p, grad, m, v = row
    wide = p.dtype == grad.dtype == torch.float32 and m.dtype == v.dtype and m.dtype in (torch.float32, torch.bfloat16)
    aligned = all(t.is_contiguous() and t.data_ptr() % ALIGNED_BYTES == 0 for t in row)
    return wide and aligned, m.dtype == torch.bfloat16, p.numel() % 16 == 0


def _in_one_launch(
    rows: Sequence[Row],
    fields: list[list[int]],
    even: bool,
    factor: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    device, sizes = rows[0][0].device, tuple(p.numel() for p, *_ in rows)
    blocks = _blocks(sizes, device)
    places = [[t.data_ptr() for t in row] for row in zip(*rows, strict=True)]
    table = _on([*places, list(sizes), *fields], device)
    rate, root = _corrected(step, lr, betas)
    with torch.cuda.device_of(rows[0][0]):
        _adamw_all[(len(blocks),)](
            table,
            blocks,
            factor,
            len(rows),
            rate,
            1 - lr * weight_decay,
            1 - betas[0],
            betas[1],
            root,
            eps,
            NARROW=bool(fields),
            EVEN=even,
            BLOCK=BLOCK,
            num_warps=8,
        )


def _on(numbers: list[list[int]], device: torch.device) -> Tensor:
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


@cache
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """[blocks, 2]: of which tensor each is a part, and which part."""
    counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes], device="cpu")
    of = torch.arange(len(sizes), device="cpu").repeat_interleave(counts)
    part = torch.arange(len(of), device="cpu") - (counts.cumsum(0) - counts)[of]
    return torch.stack([of, part], dim=1).to(torch.int32).to(device)


def _corrected(step: int, lr: float, betas: tuple[float, float]) -> tuple[float, float]:
    """The rate, and what the root of the second moment is multiplied by: both moments began at nothing."""
    # In float64, on the host: 1 - 0.999 has four digits left in float32.
    return lr / (1 - betas[0] ** step), 1 / (1 - betas[1] ** step) ** 0.5


def adamw_(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    factor: Tensor,
    spot: Spot | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One update of `p` and its moments in place, from `factor` (float32, one number) times `grad`, as torch's AdamW.

    `step` counts from 1. A factor that is NaN changes nothing: the step is not taken. Moments in 16 bits are rounded
    at random, by `spot`.
    """
    assert all(t.is_contiguous() for t in (p, m, v))
    narrow = m.dtype == torch.bfloat16
    rate, root = _corrected(step, lr, betas)
    with torch.cuda.device_of(p):
        _adamw[(triton.cdiv(p.numel(), BLOCK),)](
            p,
            grad.contiguous(),
            m,
            v,
            factor,
            _on(_fields([spot], narrow, step), p.device) if narrow else factor,  # which nobody reads
            p.numel(),
            rate,
            1 - lr * weight_decay,
            1 - betas[0],
            betas[1],
            root,
            eps,
            NARROW=narrow,
            BLOCK=BLOCK,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["rate", "keep", "fresh", "beta2", "root", "eps"])
def _adamw(  # type: ignore[no-untyped-def]
    p,
    grad,
    m,
    v,
    factor,
    spot,
    n,
    rate,
    keep,
    fresh,
    beta2,
    root,
    eps,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    noise = _noise(spot, 1, start, BLOCK) if NARROW else at
    _update(p, grad, m, v, factor, at, n, rate, keep, fresh, beta2, root, eps, noise, NARROW)


@triton.jit(do_not_specialize=["rate", "keep", "fresh", "beta2", "root", "eps"])
def _adamw_all(  # type: ignore[no-untyped-def]
    table,
    blocks,
    factor,
    tensors,
    rate,
    keep,
    fresh,
    beta2,
    root,
    eps,
    NARROW: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    of = tl.load(blocks + 2 * block).to(tl.int64)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    p = tl.multiple_of(tl.load(table + of).to(tl.pointer_type(tl.float32)), 16)
    grad = tl.multiple_of(tl.load(table + tensors + of).to(tl.pointer_type(tl.float32)), 16)
    if NARROW:
        m = tl.multiple_of(tl.load(table + 2 * tensors + of).to(tl.pointer_type(tl.bfloat16)), 16)
        v = tl.multiple_of(tl.load(table + 3 * tensors + of).to(tl.pointer_type(tl.bfloat16)), 16)
    else:
        m = tl.multiple_of(tl.load(table + 2 * tensors + of).to(tl.pointer_type(tl.float32)), 16)
        v = tl.multiple_of(tl.load(table + 3 * tensors + of).to(tl.pointer_type(tl.float32)), 16)
    n = tl.load(table + 4 * tensors + of)
    if EVEN:
        n = tl.multiple_of(n, 16)
    noise = _noise(table + 5 * tensors + of, tensors, start, BLOCK) if NARROW else at
    _update(p, grad, m, v, factor, at, n, rate, keep, fresh, beta2, root, eps, noise, NARROW)


@triton.jit
def _noise(spot, apart, start, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The random number of each element of a block, as `shoal.kernels.rounding` makes it. A block divides in 64 bits,
    its elements in 32."""
    first = tl.load(spot).to(tl.uint32)
    second = tl.load(spot + apart).to(tl.uint32)
    base = tl.load(spot + 2 * apart)
    width = tl.load(spot + 3 * apart)
    rows = tl.load(spot + 4 * apart)
    stride = tl.load(spot + 5 * apart)
    plane = tl.load(spot + 6 * apart)
    runs = start // width
    planes = runs // rows
    column = (start - runs * width).to(tl.int32) + tl.arange(0, BLOCK)
    more = column // width.to(tl.int32)
    column -= more * width.to(tl.int32)
    row = (runs - planes * rows).to(tl.int32) + more
    over = row // rows.to(tl.int32)
    row -= over * rows.to(tl.int32)
    place = base + (planes + over.to(tl.int64)) * plane + row.to(tl.int64) * stride + column.to(tl.int64)
    x = place.to(tl.uint32) ^ first
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    x = x ^ (second + (place >> 32).to(tl.uint32))
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, noise):  # type: ignore[no-untyped-def]
    """float32 that bfloat16 holds exactly; `noise` is below 2**16."""
    return ((x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    p, grad, m, v, factor, at, n, rate, keep, fresh, beta2, root, eps, noise, NARROW: tl.constexpr
):
    by = tl.load(factor)
    there = at < tl.where(by == by, n, 0)  # NaN is not itself: nothing is there
    g = tl.load(grad + at, mask=there).to(tl.float32) * by
    old_m = tl.load(m + at, mask=there).to(tl.float32)
    old_v = tl.load(v + at, mask=there).to(tl.float32)
    new_m = old_m + fresh * (g - old_m)
    new_v = beta2 * old_v + (1.0 - beta2) * g * g
    x = tl.load(p + at, mask=there).to(tl.float32) * keep
    x -= rate * new_m / (tl.sqrt(new_v) * root + eps)
    tl.store(p + at, x, mask=there)
    if NARROW:
        new_m = _rounded(new_m, noise >> 16)
        new_v = _rounded(new_v, noise & 0xFFFF)
    tl.store(m + at, new_m, mask=there)
    tl.store(v + at, new_v, mask=there)
