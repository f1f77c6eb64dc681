"""Sums whose bits do not depend on the machine.

A library's sum adds in the order that suits the processor, and one bit of difference would fork the weights of a swarm.
Here whole rows are added up, number by number in float64, and the last row exactly (`math.fsum`): every operation is
one that IEEE 754 defines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
WIDTH = 1 << 13


def dot(a: F32, b: F32) -> float:
    row = np.zeros(WIDTH, np.float64)
    for i in range(0, len(a), WIDTH):
        product = a[i : i + WIDTH].astype(np.float64)
        product *= b[i : i + WIDTH]
        row[: len(product)] += product
    return math.fsum(row)


def norm(a: F32) -> float:
    return math.sqrt(dot(a, a))


def largest(a: F32) -> float:
    return float(max(a.max(initial=0.0), -a.min(initial=0.0)))


def median(values: Sequence[float]) -> float:
    """The lower one of two: the cautious choice where it is a limit."""
    return sorted(values)[(len(values) - 1) // 2]
