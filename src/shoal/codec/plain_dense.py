"""Codecs that send every parameter, in numpy. See `plain_common`."""

from __future__ import annotations

import numpy as np

from shoal.codec.frame import LARGEST, LEAST_BITS, Bytes, Floats, Halves
from shoal.codec.plain_common import (
    PIECE,
    gathered,
    in_turn,
    lanes,
    largest,
    rounded,
    scale,
    two_magnitudes,
    two_scales,
    widened,
)

__all__ = ["add", "dot", "encode", "largest", "largest_half", "squares"]

_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: what is added to it loses its fraction, ties to even
_PARTS = np.float32(1 << 20)
_TINY = np.float32(2.0**-126)


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
    """Writes a payload's parts and the residual; returns the largest magnitude that was met."""
    most = 0.0
    for start in range(0, len(values), PIECE):
        end = min(start + PIECE, len(values))
        kept = None if residual is None else residual[start:end]
        v = gathered(values[start:end], kept, decay)
        met = largest(v)
        if not met <= LARGEST:
            return met
        most = max(most, met)
        blocks, place = slice(start // block, -(-end // block)), slice(start * bits // 8, -(-end * bits // 8))
        rows = np.zeros((-(-len(v) // block), block), np.float32)
        rows.reshape(-1)[: len(v)] = v
        if bits == 16:
            data[place] = rounded(v).view(np.uint8)
        elif bits == 2:
            high[blocks], ratio[blocks], data[place] = _two_bits(rows, len(v), block)
        else:
            high[blocks], data[place] = _levels(rows, len(v), bits)
        if kept is not None:
            kept[:] = v - _decode(bits, block, high[blocks], ratio[blocks], data[place], len(v))
    return most


def add(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, into: Floats, weight: float) -> None:
    for start in range(0, len(into), PIECE):
        end = min(start + PIECE, len(into))
        into[start:end] += np.float32(weight) * _part(bits, block, high, ratio, data, start, end)


def squares(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, count: int) -> float:
    total = 0.0
    for start in range(0, count, PIECE):
        part = _part(bits, block, high, ratio, data, start, min(start + PIECE, count)).astype(np.float64)
        total = _sum(total, part * part, block)
    return total


def dot(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, vector: Floats) -> float:
    total = 0.0
    for start in range(0, len(vector), PIECE):
        end = min(start + PIECE, len(vector))
        part = _part(bits, block, high, ratio, data, start, end).astype(np.float64)
        total = _sum(total, part * vector[start:end], block)
    return total


def largest_half(halves: Halves) -> int:
    """The largest, whatever the signs."""
    most = 0
    for start in range(0, len(halves), PIECE):
        most = max(most, int((halves[start : start + PIECE] & np.uint16(0x7FFF)).max()))
    return most


def _sum(total: float, terms: np.ndarray[tuple[int], np.dtype[np.float64]], block: int) -> float:
    rows = np.zeros((-(-len(terms) // block), block))
    rows.reshape(-1)[: len(terms)] = terms
    return in_turn(total, lanes(rows))


def _part(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, start: int, end: int) -> Floats:
    blocks = slice(start // block, -(-end // block))
    return _decode(bits, block, high[blocks], ratio[blocks], data[start * bits // 8 : -(-end * bits // 8)], end - start)


def _levels(rows: Floats, count: int, bits: int) -> tuple[Halves, Bytes]:
    """Whole multiples of a block's scale, from -127 to 127 or from -7 to 7."""
    most = np.float32(127 if bits == 8 else 7)
    scales = scale(np.abs(rows).max(axis=1) / most)
    step = widened(scales)
    inverse = np.where(scales > 0, np.float32(1) / np.where(scales > 0, step, np.float32(1)), np.float32(0))
    # The scale is within 2**-8 of the exact one, so that nothing rounds to more than `most`.
    whole = ((rows * inverse[:, None] + _ROUND) - _ROUND).astype(np.int8).view(np.uint8).reshape(-1)
    return scales, whole[:count] if bits == 8 else _packed(whole[:count] & np.uint8(15), 4)


def _two_bits(rows: Floats, count: int, block: int) -> tuple[Halves, Bytes, Bytes]:
    """A sign, and whether the magnitude is above the block's mean; each half is sent as its own mean.

    Means are of whole numbers, 2**20ths of the block's largest: their sums are the same in any order.
    """
    most = np.abs(rows).max(axis=1)
    inverse = np.where(most.view(np.uint32) >> 16 >= LEAST_BITS, np.float32(1) / np.maximum(most, _TINY), np.float32(0))
    level = ((np.abs(rows) * inverse[:, None]) * _PARTS).astype(np.int32)
    n = np.full(len(rows), block, np.int32)
    n[-1] = count - (len(rows) - 1) * block
    total = level.sum(axis=1, dtype=np.int32)
    above = level * n[:, None] > total[:, None]
    highs = above.sum(axis=1, dtype=np.int32)
    over = (level * above).sum(axis=1, dtype=np.int32)
    low, top = (
        most * (part.astype(np.float32) / (np.maximum(of, 1).astype(np.float32) * _PARTS))
        for part, of in ((total - over, n - highs), (over, highs))
    )
    scales, ratio = two_scales(np.where(highs > 0, top, low), low)
    code = np.signbit(rows).astype(np.uint8) | (above.astype(np.uint8) << 1)
    return scales, ratio, _packed(code.reshape(-1)[:count], 2)


def _decode(bits: int, block: int, high: Halves, ratio: Bytes, data: Bytes, count: int) -> Floats:
    if bits == 16:
        return widened(data.view(np.uint16))
    if bits == 2:
        code = _unpacked(data, 2, count)
        big, small = (np.repeat(m, block)[:count] for m in two_magnitudes(high, ratio))
        size = np.where(code & 2, big, small)
        return np.where(code & 1, -size, size)
    whole = data.view(np.int8) if bits == 8 else (_unpacked(data, 4, count) << 4).view(np.int8) >> 4
    return whole.astype(np.float32) * np.repeat(widened(high), block)[:count]


def _packed(codes: Bytes, bits: int) -> Bytes:
    """The first code in a byte's lowest bits."""
    each = 8 // bits
    full = np.zeros(-(-len(codes) // each) * each, np.uint8)
    full[: len(codes)] = codes
    out = np.zeros(len(full) // each, np.uint8)
    for i in range(each):
        out |= full[i::each] << (i * bits)
    return out


def _unpacked(data: Bytes, bits: int, count: int) -> Bytes:
    each = 8 // bits
    out = np.empty(len(data) * each, np.uint8)
    for i in range(each):
        out[i::each] = (data >> (i * bits)) & ((1 << bits) - 1)
    return out[:count]
