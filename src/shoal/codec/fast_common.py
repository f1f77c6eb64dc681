"""What the compiled kernels share. Each does what its plain namesake does, to the last bit."""

# mypy: ignore-errors
# Types here are those that numba infers; a checker of Python's knows no 32-bit whole numbers.
from __future__ import annotations

import numpy as np

from shoal.codec.compiled import compiled
from shoal.codec.frame import LARGEST_BITS, LEAST_BITS, Floats

_LEAST = np.uint32(LEAST_BITS)
LARGEST_WORD = np.uint32(LARGEST_BITS << 16)


@compiled
def largest_bits(bits: np.ndarray) -> int:
    most = np.uint32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.uint32(0x7FFFFFFF))
    return most


def largest(values: Floats) -> float:
    return from_bits(largest_bits(values.view(np.uint32)))


def from_bits(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


@compiled
def gather(values: Floats, residual: Floats, decay: np.float32, v: Floats) -> int:
    """v = values + decay * residual, where there is a residual. Returns the largest magnitude's bits."""
    most = np.uint32(0)
    if len(residual):
        for i in range(len(values)):
            v[i] = values[i] + decay * residual[i]
    else:
        for i in range(len(values)):
            v[i] = values[i]
    for i in range(len(values)):
        most = max(most, np.float32(v[i]).view(np.uint32) & np.uint32(0x7FFFFFFF))
    return most


@compiled
def rounded(bits: int) -> int:
    """To the upper half of a float32, to nearest, ties to even."""
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@compiled
def widened(half: int) -> np.float32:
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@compiled
def scale(value: np.float32) -> int:
    half = rounded(np.float32(value).view(np.uint32))
    return half if half >= _LEAST else np.uint32(0)


@compiled
def low_share(half: int, low: np.float32) -> int:
    """The lower magnitude in 256ths of the higher, less one."""
    base = widened(half) if half > 0 else np.float32(1)
    share = np.floor(low / base * np.float32(256) + np.float32(0.5))
    return np.uint8(min(max(share, np.float32(1)), np.float32(256)) - np.float32(1))


@compiled
def low_magnitude(half: int, ratio: int) -> np.float32:
    return widened(half) * ((np.float32(ratio) + np.float32(1)) * np.float32(1 / 256))
