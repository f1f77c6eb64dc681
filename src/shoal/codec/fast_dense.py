"""Codecs that send every parameter, compiled. What each does is said in `plain_dense`."""

# mypy: ignore-errors
# Types here are those that numba infers; a checker of Python's knows no 32-bit whole numbers.
from __future__ import annotations

import numpy as np

from shoal.codec.compiled import compiled
from shoal.codec.fast_common import (
    LARGEST_WORD,
    from_bits,
    gather,
    largest,
    low_magnitude,
    low_share,
    rounded,
    scale,
    widened,
)
from shoal.codec.frame import LEAST_BITS, Bytes, Floats, Halves

__all__ = ["add", "dot", "encode", "largest", "largest_half", "squares"]

_ROUND = np.float32(12582912.0)
_NONE = np.zeros(0, np.float32)
_LANES = 16
_PARTS = np.float32(1 << 20)
_PIECE = 4096


def encode(
    bits: int,
    block: int,
    values: Floats,
    residual: Floats | None,
    decay: float,
    high: Halves,
    ratio: Bytes,
    data: Bytes,
) -> float:
    kept = _NONE if residual is None else residual
    if bits == 16:
        return from_bits(_encode_halves(values, kept, np.float32(decay), data.view(np.uint16)))
    return from_bits(_encode_blocks(bits, block, values, kept, np.float32(decay), high, ratio, data))


def add(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, into: Floats, weight: float) -> None:
    if bits == 16:
        _add_halves(data.view(np.uint16), into, np.float32(weight))
    else:
        _add_blocks(bits, block, high, ratio, data, into, np.float32(weight))


def squares(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, count: int) -> float:
    return float(_squares(bits, block, high, ratio, data, data.view(np.uint16) if bits == 16 else high, count))


def dot(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, vector: Floats) -> float:
    return float(_dot(bits, block, high, ratio, data, data.view(np.uint16) if bits == 16 else high, vector))


@compiled
def largest_half(halves: Halves) -> int:
    most = np.uint16(0)
    for i in range(len(halves)):
        most = max(most, halves[i] & np.uint16(0x7FFF))
    return most


@compiled
def _encode_halves(values: Floats, residual: Floats, decay: np.float32, out: Halves) -> int:
    v, met = np.zeros(_PIECE, np.float32), np.uint32(0)
    for start in range(0, len(values), _PIECE):
        part = values[start : start + _PIECE]
        kept, halves = residual[start : start + _PIECE], out[start : start + _PIECE]
        met = max(met, gather(part, kept, decay, v))
        if met > LARGEST_WORD:
            break
        for i in range(len(part)):
            halves[i] = rounded(np.float32(v[i]).view(np.uint32))
        for i in range(len(kept)):
            kept[i] = v[i] - widened(halves[i])
    return met


@compiled
def _add_halves(halves: Halves, into: Floats, weight: np.float32) -> None:
    for i in range(len(into)):
        into[i] += weight * widened(halves[i])


@compiled
def _encode_blocks(
    bits: int,
    block: int,
    values: Floats,
    residual: Floats,
    decay: np.float32,
    high: Halves,
    ratio: Bytes,
    data: Bytes,
) -> int:
    v, codes, level = np.zeros(block, np.float32), np.zeros(block, np.uint8), np.zeros(block, np.int32)
    each, met = 8 // bits, np.uint32(0)
    for b in range(len(high)):
        start = b * block
        n = min(block, len(values) - start)
        kept = residual[start : start + n]
        if n < block:
            v[:] = 0
            codes[:] = 0
        most = gather(values[start : start + n], kept, decay, v)
        met = max(met, most)
        if met > LARGEST_WORD:
            break
        if bits == 2:
            high[b], ratio[b] = _two_bits(v[:n], np.uint32(most), codes, level, kept)
        else:
            high[b] = _levels(v[:n], np.uint32(most), np.float32(127 if bits == 8 else 7), codes, kept)
        _pack(codes, bits, n, data[start // each : (start + n + each - 1) // each])
    return met


@compiled
def _levels(v: Floats, most: int, steps: np.float32, codes: Bytes, kept: Floats) -> int:
    half = scale(np.uint32(most).view(np.float32) / steps)
    step = widened(half)
    inverse = np.float32(1) / step if half > 0 else np.float32(0)
    for i in range(len(v)):
        codes[i] = np.uint8(np.int32((v[i] * inverse + _ROUND) - _ROUND))
    for i in range(len(kept)):
        kept[i] = v[i] - np.float32(np.int8(codes[i])) * step
    return half


@compiled
def _two_bits(v: Floats, most: int, codes: Bytes, level: np.ndarray, kept: Floats) -> tuple[int, int]:
    n, best = np.int32(len(v)), np.uint32(most).view(np.float32)
    inverse = np.float32(1) / best if most >> 16 >= LEAST_BITS else np.float32(0)
    total, over, highs = np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(v)):
        part = np.int32((abs(v[i]) * inverse) * _PARTS)
        level[i] = part
        total = np.int32(total + part)
    for i in range(len(v)):
        above = np.int32(np.int32(level[i] * n) > total)
        over = np.int32(over + np.int32(level[i] * above))
        highs = np.int32(highs + above)
    low = best * (np.float32(total - over) / (np.float32(max(n - highs, 1)) * _PARTS))
    top = best * (np.float32(over) / (np.float32(highs) * _PARTS)) if highs else low
    half = scale(top)
    share = low_share(half, low)
    big, small = widened(half), low_magnitude(half, share)
    for i in range(len(v)):
        above = np.int32(level[i] * n) > total
        sign = np.float32(v[i]).view(np.uint32) >> np.uint32(31)
        codes[i] = np.uint8(sign | (np.uint32(2) if above else np.uint32(0)))
    for i in range(len(kept)):
        size = big if codes[i] & 2 else small
        kept[i] = v[i] - (-size if codes[i] & 1 else size)
    return half, share


@compiled
def _across(lanes: np.ndarray) -> np.float32:
    total = lanes.dtype.type(0)
    for lane in range(_LANES):
        total += lanes[lane]
    return total


@compiled
def _pack(codes: Bytes, bits: int, n: int, data: Bytes) -> None:
    if bits == 8:
        for i in range(n):
            data[i] = codes[i]
    elif bits == 4:
        for i in range(len(data)):
            data[i] = (codes[2 * i] & 15) | (codes[2 * i + 1] << 4)
    else:
        for i in range(len(data)):
            data[i] = codes[4 * i] | (codes[4 * i + 1] << 2) | (codes[4 * i + 2] << 4) | (codes[4 * i + 3] << 6)


@compiled
def _decode(bits: int, half: int, share: int, data: Bytes, n: int, out: Floats) -> None:
    """A block; what is beyond its n values may be anything."""
    step = widened(half)
    if bits == 8:
        for i in range(n):
            out[i] = np.float32(np.int8(data[i])) * step
    elif bits == 4:
        for i in range(len(data)):
            out[2 * i] = np.float32(np.int8(data[i] << 4) >> 4) * step
            out[2 * i + 1] = np.float32(np.int8(data[i]) >> 4) * step
    else:
        low = low_magnitude(half, share)
        for i in range(len(data)):
            for j in range(4):
                code = data[i] >> (2 * j)
                size = step if code & 2 else low
                out[4 * i + j] = -size if code & 1 else size


@compiled
def _add_blocks(
    bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, into: Floats, weight: np.float32
) -> None:
    out = np.zeros(block, np.float32)
    each = 8 // bits
    for b in range(len(high)):
        start = b * block
        n = min(block, len(into) - start)
        share = ratio[b] if bits == 2 else np.uint8(0)
        _decode(bits, high[b], share, data[start // each : -(-(start + n) // each)], n, out)
        part = into[start : start + n]
        for i in range(n):
            part[i] += weight * out[i]


@compiled
def _block(
    bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, halves: Halves, b: int, n: int, out: Floats
) -> None:
    """Block b, with zeros after its last value."""
    start = b * block
    if bits == 16:
        part = halves[start : start + n]
        for i in range(n):
            out[i] = widened(part[i])
    else:
        each = 8 // bits
        share = ratio[b] if bits == 2 else np.uint8(0)
        _decode(bits, high[b], share, data[start // each : -(-(start + n) // each)], n, out)
    for i in range(n, block):
        out[i] = 0


@compiled
def _squares(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, halves: Halves, count: int) -> float:
    out, sums, total = np.zeros(block, np.float32), np.zeros(_LANES, np.float64), 0.0
    for b in range(-(-count // block)):
        _block(bits, block, high, ratio, data, halves, b, min(block, count - b * block), out)
        sums[:] = 0
        for row in range(block // _LANES):
            part = out[row * _LANES : (row + 1) * _LANES]
            for lane in range(_LANES):
                sums[lane] += np.float64(part[lane]) * np.float64(part[lane])
        total += _across(sums)
    return total


@compiled
def _dot(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, halves: Halves, vector: Floats) -> float:
    out, other = np.zeros(block, np.float32), np.zeros(block, np.float32)
    sums, total = np.zeros(_LANES, np.float64), 0.0
    for b in range(-(-len(vector) // block)):
        n = min(block, len(vector) - b * block)
        _block(bits, block, high, ratio, data, halves, b, n, out)
        other[:n] = vector[b * block : b * block + n]
        sums[:] = 0
        for row in range(block // _LANES):
            part, beside = out[row * _LANES : (row + 1) * _LANES], other[row * _LANES : (row + 1) * _LANES]
            for lane in range(_LANES):
                sums[lane] += np.float64(part[lane]) * np.float64(beside[lane])
        total += _across(sums)
    return total
