"""Two histories become one: the mean of both halves' weights, by their tokens since they parted.

That is the ancestor plus what both have learned, by their tokens; but it is told from the two ends alone, so that the
bits are the same wherever a peer had to begin to replay them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.swarm.outer.exact import F32
from shoal.swarm.outer.outer import BLOCK, Outer


def merge(into: Outer, branches: Sequence[Outer], tokens: Sequence[int], round: int) -> Outer:
    """`into` becomes the merged state, and is returned. The branches stand in the order of the record's parents."""
    shares = _shares(tokens)
    _blend(into.theta, [branch.theta for branch in branches], shares)
    if into.momentum is not None:
        _blend(into.momentum, [branch.momentum for branch in branches if branch.momentum is not None], shares)
    into.round = round
    return into


def _shares(tokens: Sequence[int]) -> list[np.float32]:
    total = math.fsum(tokens)
    return [np.float32(n / total if total else 1 / len(tokens)) for n in tokens]


def _blend(into: F32, ends: Sequence[F32], shares: Sequence[np.float32]) -> None:
    for i in range(0, len(into), BLOCK):
        mean = np.zeros_like(into[i : i + BLOCK])
        for end, share in zip(ends, shares, strict=True):
            mean += share * end[i : i + BLOCK]
        into[i : i + BLOCK] = mean
