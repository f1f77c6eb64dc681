"""What the plain kernels share: rounding to scales, and sums whose order is part of the format.

The plain kernels (`plain_*`) say in numpy what the compiled ones (`fast_*`) do, to the last bit. They are used where
numba is not installed, and to test the others. Sums are done in an order that both can follow: 16 lanes, each from
its first number to its last, then the lanes from the first to the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.codec.frame import LEAST_BITS, Bytes, Floats, Halves

LANES = 16
PIECE = 1 << 16  # parameters looked at together, so that what is needed on the way stays small
Doubles = NDArray[np.float64]


def largest(values: Floats) -> float:
    """The largest magnitude; not finite where a value is not."""
    bits, most = values.view(np.uint32), 0
    for start in range(0, len(bits), PIECE):
        most = max(most, int((bits[start : start + PIECE] & np.uint32(0x7FFFFFFF)).max()))
    return float(np.array([most], np.uint32).view(np.float32)[0])


def gathered(values: Floats, residual: Floats | None, decay: float) -> Floats:
    """values + decay * residual; the product is rounded before it is added, on every machine."""
    return values.copy() if residual is None else values + np.float32(decay) * residual


def rounded(values: Floats) -> Halves:
    """To the upper half of a float32, to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def widened(halves: Halves) -> Floats:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def scale(values: Floats) -> Halves:
    """Of what is not negative; too small a scale is 0, and its values wait in the residual."""
    halves = rounded(values)
    halves[halves < LEAST_BITS] = 0
    return halves


def two_scales(high: Floats, low: Floats) -> tuple[Halves, Bytes]:
    """Two magnitudes in 24 bits: the high one, and the low one in 256ths of it, less one."""
    halves = scale(high)
    base = np.where(halves > 0, widened(halves), np.float32(1))
    share = np.floor(low / base * np.float32(256) + np.float32(0.5))
    return halves, (np.clip(share, np.float32(1), np.float32(256)) - np.float32(1)).astype(np.uint8)


def two_magnitudes(halves: Halves, ratio: Bytes) -> tuple[Floats, Floats]:
    """High and low, exactly."""
    high = widened(halves)
    return high, high * ((ratio.astype(np.float32) + np.float32(1)) * np.float32(1 / 256))


def lanes(rows: NDArray[Any]) -> NDArray[Any]:
    """Sums of rows whose length is a multiple of the lanes, in the order of the format."""
    by_lane = rows.reshape(len(rows), -1, LANES)
    total = np.zeros((len(rows), LANES), rows.dtype)
    for i in range(by_lane.shape[1]):
        total += by_lane[:, i]
    out = np.zeros(len(rows), rows.dtype)
    for lane in range(LANES):
        out += total[:, lane]
    return out


def in_turn(first: float, terms: Doubles) -> float:
    """first + terms, one after the other. A cumulative sum has no other choice of order."""
    return float(np.cumsum(np.concatenate([np.array([first]), terms]))[-1])
