"""AdamW in plain operations: the twin of `shoal.kernels.adamw`, for moments that torch's own does not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.rounding import Spot, rounded


def adamw_all_(
    rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    factor: Tensor,
    spots: Sequence[Spot | None] = (),
    **about: Any,
) -> None:
    """`adamw_` of many: parameter, gradient and both moments each, and where they lie in the whole."""
    for row, spot in zip(rows, spots or [None] * len(rows), strict=True):
        adamw_(*row, factor, spot, **about)


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
    """One update of `p` and its moments in place, from `factor` times `grad`, computed in float32. `step` from 1. A
    factor that is NaN changes nothing; a GPU is waited for to know it, which the kernel does without."""
    if factor.isnan():
        return
    g = grad.float() * factor
    new_m = m.float().lerp_(g, 1 - betas[0])
    new_v = v.float().mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    root = (1 - betas[1] ** step) ** 0.5
    p.mul_(1 - lr * weight_decay).addcdiv_(new_m, (new_v.sqrt() / root).add_(eps), value=-lr / (1 - betas[0] ** step))
    if m.dtype == torch.bfloat16:
        assert spot is not None, "16 bits are rounded by place"
        noise = spot.noise(step, p)
        new_m, new_v = rounded(new_m, noise >> 16), rounded(new_v, noise & 0xFFFF)
    m.copy_(new_m)
    v.copy_(new_v)
