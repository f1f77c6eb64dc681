"""Two histories become one: the ancestor's weights, plus what both halves have learned since, by their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.fleet.outer.exact import F32
from shoal.fleet.outer.outer import BLOCK, Outer


def merge(base: Outer, branches: Sequence[Outer], tokens: Sequence[int], round: int) -> Outer:
    """`base` becomes the merged state, and is returned. The branches stand in the order of the record's parents."""
    shares = _shares(tokens)
    _blend(base.theta, [branch.theta for branch in branches], shares)
    if base.momentum is not None:
        _blend(base.momentum, [branch.momentum for branch in branches if branch.momentum is not None], shares)
    base.round = round
    return base


def _shares(tokens: Sequence[int]) -> list[np.float32]:
    total = math.fsum(tokens)
    return [np.float32(n / total if total else 1 / len(tokens)) for n in tokens]


def _blend(base: F32, ends: Sequence[F32], shares: Sequence[np.float32]) -> None:
    for i in range(0, len(base), BLOCK):
        begin = base[i : i + BLOCK].copy()
        for end, share in zip(ends, shares, strict=True):
            base[i : i + BLOCK] += share * (end[i : i + BLOCK] - begin)
