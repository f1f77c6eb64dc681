"""The largest values of each chunk, in numpy. See `plain_common`; the format is in `topk`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.codec.frame import LARGEST, Bytes, Floats, Halves
from shoal.codec.plain_common import PIECE, gathered, in_turn, largest, two_magnitudes, two_scales

__all__ = ["add", "beyond", "dot", "encode", "entries", "largest", "squares"]

Counts = NDArray[np.int64]


def encode(
    chunk: int, keep: int, values: Floats, residual: Floats | None, decay: float, rice_most: int
) -> tuple[float | Halves | Bytes | NDArray[np.uint32], ...]:
    """The largest magnitude that was met, then a payload's sections, in their order."""
    found, largest_met = [], 0.0
    for at, end, size, most in _pieces(len(values), chunk, keep):
        kept = None if residual is None else residual[at:end]
        v = gathered(values[at:end], kept, decay)
        met = largest(v)
        if not met <= LARGEST:
            return (met,)
        largest_met = max(largest_met, met)
        found.append(_piece(v.reshape(-1, size), kept, most, rice_most))
    high, ratio, rice, count, code, gap = (np.concatenate([f[i] for f in found]) for i in range(6))
    full = count == -(-keep * _sizes(len(values), chunk) // chunk)
    shape = (rice | np.where(full, 16, 0)).astype(np.uint8)
    each = np.repeat(rice, count)
    return (
        largest_met,
        high.astype(np.uint16),
        ratio.astype(np.uint8),
        shape,
        count[~full].astype(np.uint32),
        _fixed(code, np.full(len(code), 2)),
        _fixed(gap & ((1 << each) - 1), each),
        _unary(gap >> each),
    )


def beyond(chunk: int, size: int, rice: Bytes, count: Counts, lows: Bytes, unary: Bytes) -> int:
    """The place (from 1) of the first entry that lies beyond its chunk, or 0."""
    inside = _inside(rice, count, lows, unary)
    wrong = inside >= np.repeat(_sizes(size, chunk), count)
    return int(np.argmax(wrong)) + 1 if wrong.any() else 0


def entries(
    chunk: int, high: Halves, ratio: Bytes, rice: Bytes, count: Counts, codes: Bytes, lows: Bytes, unary: Bytes
) -> tuple[Counts, Floats]:
    code = _read(codes, np.full(int(count.sum()), 2))
    big, small = (np.repeat(m, count) for m in two_magnitudes(high, ratio))
    size = np.where(code & 2, big, small)
    start = np.repeat(np.arange(len(count), dtype=np.int64) * chunk, count)
    return start + _inside(rice, count, lows, unary), np.where(code & 1, -size, size)


def add(
    chunk: int,
    high: Halves,
    ratio: Bytes,
    rice: Bytes,
    count: Counts,
    codes: Bytes,
    lows: Bytes,
    unary: Bytes,
    into: Floats,
    weight: float,
) -> None:
    index, value = entries(chunk, high, ratio, rice, count, codes, lows, unary)
    into[index] += np.float32(weight) * value


def squares(
    chunk: int, high: Halves, ratio: Bytes, rice: Bytes, count: Counts, codes: Bytes, lows: Bytes, unary: Bytes
) -> float:
    value = entries(chunk, high, ratio, rice, count, codes, lows, unary)[1].astype(np.float64)
    return in_turn(0.0, value * value)


def dot(
    chunk: int,
    high: Halves,
    ratio: Bytes,
    rice: Bytes,
    count: Counts,
    codes: Bytes,
    lows: Bytes,
    unary: Bytes,
    vector: Floats,
) -> float:
    index, value = entries(chunk, high, ratio, rice, count, codes, lows, unary)
    return in_turn(0.0, value.astype(np.float64) * vector[index])


def _inside(rice: Bytes, count: Counts, lows: Bytes, unary: Bytes) -> Counts:
    """Places of the entries in their chunks."""
    each = np.repeat(rice.astype(np.int64), count)
    ones = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
    gap = ((np.diff(ones, prepend=-1) - 1) << each) | _read(lows, each)
    steps = np.concatenate([np.zeros(1, np.int64), np.cumsum(gap + 1)])
    return steps[1:] - np.repeat(steps[np.cumsum(count) - count], count) - 1


def _sizes(size: int, chunk: int) -> Counts:
    sizes = np.full(-(-size // chunk), chunk, np.int64)
    sizes[-1:] = size - (len(sizes) - 1) * chunk
    return sizes


def _pieces(count: int, chunk: int, keep: int) -> list[tuple[int, int, int, int]]:
    """Whole chunks some at a time, then the short one: from, to, the chunk's size, how many of it are kept."""
    several = max(1, PIECE // chunk) * chunk
    whole = count - count % chunk
    pieces = [(at, min(at + several, whole), chunk, keep) for at in range(0, whole, several)]
    if whole < count:
        rest = count - whole
        pieces.append((whole, count, rest, -(-keep * rest // chunk)))
    return pieces


def _piece(
    v: Floats, residual: Floats | None, most: int, rice_most: int
) -> tuple[Halves, Bytes, Counts, Counts, Counts, Counts]:
    mask = _chosen(np.abs(v).view(np.uint32), most)
    count = mask.sum(axis=1)
    magnitude = np.where(mask, np.abs(v), np.float32(0)).astype(np.float64)
    total = _in_order(magnitude, mask)
    mean = total / np.maximum(count, 1)
    above = mask & (magnitude > mean[:, None])
    highs = above.sum(axis=1)
    top = _in_order(magnitude, above) / np.maximum(highs, 1)
    bottom = _in_order(magnitude, mask & ~above) / np.maximum(count - highs, 1)
    high, ratio = two_scales(np.where(highs > 0, top, bottom).astype(np.float32), bottom.astype(np.float32))
    mask &= (high > 0)[:, None]  # too small for a scale: waits in the residual
    ratio[high == 0] = 0
    count = mask.sum(axis=1)
    rows, columns = np.nonzero(mask)
    negative, big = np.signbit(v)[rows, columns], above[rows, columns]
    if residual is not None:
        up, down = two_magnitudes(high, ratio)
        sent = np.where(big, up[rows], down[rows])
        v[rows, columns] -= np.where(negative, -sent, sent)
        residual[:] = v.reshape(-1)
    gap = np.diff(columns, prepend=-1) - 1
    first = (np.cumsum(count) - count)[count > 0]
    gap[first] = columns[first]
    return (
        high,
        ratio,
        _rice(gap, count, rice_most),
        count,
        negative.astype(np.int64) | (big.astype(np.int64) << 1),
        gap,
    )


def _chosen(key: NDArray[np.uint32], most: int) -> NDArray[np.bool_]:
    """The largest of each row that are not 0; of equal ones the first."""
    edge = np.partition(key, key.shape[1] - most, axis=1)[:, key.shape[1] - most][:, None]
    more = key > edge
    equal = (key == edge) & (edge > 0)
    return more | (equal & (np.cumsum(equal, axis=1) <= most - more.sum(axis=1, keepdims=True)))


def _in_order(magnitude: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Sums of the chosen, from the first to the last."""
    return np.cumsum(np.where(mask, magnitude, 0.0), axis=1)[:, -1]


def _rice(gap: Counts, count: Counts, rice_most: int) -> Counts:
    """For each chunk the number of low bits with which its gaps are shortest; of equal ones the least."""
    row = np.repeat(np.arange(len(count)), count)
    cost = [
        count * (k + 1) + np.bincount(row, weights=gap >> k, minlength=len(count)).astype(np.int64)
        for k in range(rice_most + 1)
    ]
    return np.argmin(np.stack(cost), axis=0).astype(np.int64) if len(count) else np.zeros(0, np.int64)


def _fixed(numbers: Counts, width: Counts) -> Bytes:
    """Numbers of so many bits each, one after the other, the lowest bit first."""
    start = np.cumsum(width) - width
    bits = np.zeros(int(width.sum()), np.uint8)
    for b in range(int(width.max(initial=0))):
        there = width > b
        bits[start[there] + b] = (numbers[there] >> b) & 1
    return np.packbits(bits, bitorder="little")


def _unary(numbers: Counts) -> Bytes:
    """So many zeros, then a one."""
    ones = np.cumsum(numbers + 1) - 1
    bits = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, np.uint8)
    bits[ones] = 1
    return np.packbits(bits, bitorder="little")


def _read(data: Bytes, width: Counts) -> Counts:
    bits = np.unpackbits(data, bitorder="little")
    start = np.cumsum(width) - width
    out = np.zeros(len(width), np.int64)
    for b in range(int(width.max(initial=0))):
        there = width > b
        out[there] |= bits[start[there] + b].astype(np.int64) << b
    return out
