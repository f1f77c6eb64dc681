"""AdamW that takes the clipping's factor along: the gradient is read once and never written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


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
    # In float64, on the host: 1 - 0.999 has four digits left in float32.
    corrections = (1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5)
    with torch.cuda.device_of(p):
        _adamw[(triton.cdiv(p.numel(), BLOCK),)](
            p,
            grad.contiguous(),
            m,
            v,
            factor,
            p.numel(),
            lr / corrections[0],
            1 - lr * weight_decay,
            1 - betas[0],
            betas[1],
            1 / corrections[1],
            eps,
            BLOCK=BLOCK,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["rate", "keep", "fresh", "beta2", "root", "eps"])
def _adamw(p, grad, m, v, factor, n, rate, keep, fresh, beta2, root, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
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
