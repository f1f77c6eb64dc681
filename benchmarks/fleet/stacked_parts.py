"""What arrives of parts that are coded, for many rows at once and on any device: the numbers that Shoal's codecs send
(a test compares the two), without the bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.codec.dense import BLOCKS
from shoal.swarm.outer.rule import Rule

LEAST = 2.0**-126


def arrives(rule: Rule, values: Tensor) -> Tensor:
    """[rows, count] as it is once decoded. float32."""
    if rule.codec == "bf16":
        return values.bfloat16().float()
    if rule.codec == "topk":
        return _by_chunks(values, rule.chunk, lambda v: _largest(v, -(-rule.keep * v.shape[-1] // rule.chunk)))
    code = _two_bits if rule.codec == "2bit" else _levels(127 if rule.codec == "int8" else 7)
    return _by_chunks(values, BLOCKS[rule.codec], code)


def _by_chunks(values: Tensor, size: int, code: Callable[[Tensor], Tensor]) -> Tensor:
    rows, count = values.shape
    whole = count - count % size
    parts = [code(values[:, :whole].reshape(rows, -1, size)).reshape(rows, -1)] if whole else []
    if whole < count:
        parts.append(code(values[:, None, whole:]).reshape(rows, -1))
    return torch.cat(parts, 1)


def _largest(v: Tensor, keep: int) -> Tensor:
    size = v.abs()
    where = size.topk(keep, dim=-1).indices
    mask = torch.zeros_like(v, dtype=torch.bool).scatter_(-1, where, True) & (size > 0)
    return _two_magnitudes(v, size, mask, mask.sum(-1, keepdim=True))


def _two_bits(v: Tensor) -> Tensor:
    mask = torch.ones_like(v, dtype=torch.bool)
    return _two_magnitudes(v, v.abs(), mask, mask.sum(-1, keepdim=True))


def _two_magnitudes(v: Tensor, size: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Those above the mean are sent as their own mean, and so are the others."""
    size = torch.where(mask, size, 0.0)
    total = size.double().sum(-1, keepdim=True)
    above = mask & (size > total / count.clamp(min=1))
    highs = above.sum(-1, keepdim=True)
    over = torch.where(above, size, 0.0).double().sum(-1, keepdim=True)
    low = (total - over) / (count - highs).clamp(min=1)
    high = torch.where(highs > 0, over / highs.clamp(min=1), low).float().bfloat16().float()
    share = (low.float() / torch.where(high > 0, high, 1.0) * 256 + 0.5).floor().clamp(1, 256) / 256
    sent = torch.where(above, high, high * share)
    return torch.where(mask, torch.where(v.signbit(), -sent, sent), 0.0)


def _levels(most: int) -> Callable[[Tensor], Tensor]:
    def code(v: Tensor) -> Tensor:
        scale = (v.abs().amax(-1, keepdim=True) / most).bfloat16().float()
        inverse = torch.where(scale > LEAST, 1 / scale.clamp(min=LEAST), 0.0)
        return (v * inverse).round() * scale

    return code
