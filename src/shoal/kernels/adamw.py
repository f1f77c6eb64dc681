"""AdamW that takes the clipping's factor along: the gradient is read once and never written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
ALIGNED_BYTES = 16  # of addresses that the kernel for many tensors may be told of

Row = tuple[Tensor, Tensor, Tensor, Tensor]  # a parameter, its gradient, its two moments


def adamw_all_(rows: Iterable[Row], factor: Tensor, **about: Any) -> None:
    """`adamw_` of many parameters in one launch: a model sharded over many processes has hundreds of small ones, and
    each would take longer to launch than to update. Those that lie otherwise in memory go one by one."""
    by_kind: dict[tuple[bool, bool, bool], list[Row]] = defaultdict(list)
    for p, grad, m, v in rows:
        if p.numel():
            row = (p, grad.contiguous(), m, v)
            by_kind[_joins(row)].append(row)
    for (joins, narrow, even), some in by_kind.items():
        if joins:
            _in_one_launch(some, narrow, even, factor, **about)
        else:
            for row in some:
                adamw_(*row, factor, **about)


def _joins(row: Row) -> tuple[bool, bool, bool]:
    """Whether a parameter can be updated with others, and with which: those whose moments have as many bits, and whose
    numbers can be read four at a time to their end."""
    p, grad, m, v = row
    wide = p.dtype == grad.dtype == torch.float32 and m.dtype == v.dtype and m.dtype in (torch.float32, torch.bfloat16)
    aligned = all(t.is_contiguous() and t.data_ptr() % ALIGNED_BYTES == 0 for t in row)
    return wide and aligned, m.dtype == torch.bfloat16, p.numel() % 16 == 0


def _in_one_launch(
    rows: Sequence[Row],
    narrow: bool,
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
    table = torch.tensor([*places, sizes], dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    table = table.to(device, non_blocking=True)
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
            NARROW=narrow,
            EVEN=even,
            BLOCK=BLOCK,
            num_warps=8,
        )


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
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One update of `p` and its moments in place, from `factor` (float32, one number) times `grad`, as torch's AdamW.

    `step` counts from 1. A factor that is NaN changes nothing: the step is not taken.
    """
    assert all(t.is_contiguous() for t in (p, m, v))
    rate, root = _corrected(step, lr, betas)
    with torch.cuda.device_of(p):
        _adamw[(triton.cdiv(p.numel(), BLOCK),)](
            p,
            grad.contiguous(),
            m,
            v,
            factor,
            p.numel(),
            rate,
            1 - lr * weight_decay,
            1 - betas[0],
            betas[1],
            root,
            eps,
            BLOCK=BLOCK,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["rate", "keep", "fresh", "beta2", "root", "eps"])
def _adamw(p, grad, m, v, factor, n, rate, keep, fresh, beta2, root, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _update(p, grad, m, v, factor, at, n, rate, keep, fresh, beta2, root, eps)


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
    at = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
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
    _update(p, grad, m, v, factor, at, n, rate, keep, fresh, beta2, root, eps)


@triton.jit
def _update(p, grad, m, v, factor, at, n, rate, keep, fresh, beta2, root, eps):  # type: ignore[no-untyped-def]
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
    tl.store(m + at, new_m, mask=there)
    tl.store(v + at, new_v, mask=there)
