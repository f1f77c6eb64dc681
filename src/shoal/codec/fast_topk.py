"""The largest values of each chunk, compiled. What it does is said in `plain_topk`, the format in `topk`."""

# mypy: ignore-errors
# Types here are those that numba infers; a checker of Python's knows no 32-bit whole numbers.
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.codec.compiled import compiled
from shoal.codec.fast_common import LARGEST_WORD, from_bits, gather, largest, low_magnitude, low_share, scale, widened
from shoal.codec.fast_select import chosen
from shoal.codec.frame import Bytes, Floats, Halves

__all__ = ["add", "beyond", "dot", "encode", "entries", "largest", "squares"]

Counts = NDArray[np.int64]
_NONE = np.zeros(0, np.float32)


def encode(
    chunk: int, keep: int, values: Floats, residual: Floats | None, decay: float, rice_most: int
) -> tuple[float | Halves | Bytes | NDArray[np.uint32], ...]:
    n = -(-len(values) // chunk)
    high, ratio, shape = np.zeros(n, np.uint16), np.zeros(n, np.uint8), np.zeros(n, np.uint8)
    counts = np.zeros(n, np.uint32)
    # Zeroed pages that nobody touches cost nothing, so these may be as long as the worst case.
    codes, lows, unary = (np.zeros(n * keep * bits // 8 + 8, np.uint8) for bits in (2, rice_most, rice_most + 2))
    kept = _NONE if residual is None else residual
    most, fewer, entries, low_bits, unary_bits = _encode(
        chunk, keep, values, kept, np.float32(decay), rice_most, high, ratio, shape, counts, codes, lows, unary
    )
    return (
        from_bits(most),
        high,
        ratio,
        shape,
        counts[:fewer],
        codes[: -(-2 * entries // 8)],
        lows[: -(-low_bits // 8)],
        unary[: -(-unary_bits // 8)],
    )


@compiled
def _encode(
    chunk: int,
    keep: int,
    values: Floats,
    residual: Floats,
    decay: np.float32,
    rice_most: int,
    high: Halves,
    ratio: Bytes,
    shape: Bytes,
    counts: NDArray[np.uint32],
    codes: Bytes,
    lows: Bytes,
    unary: Bytes,
) -> tuple[int, int, int, int, int]:
    scratch, gap = np.zeros(chunk, np.float32), np.zeros(keep, np.int32)
    flags, key, place = (
        np.zeros(chunk // 64 * 64 + 64, np.uint8),
        np.zeros(chunk + 8, np.int32),
        np.zeros(chunk + 8, np.int32),
    )
    groups = np.zeros(2 * keep + 16, np.int32)
    met, fewer, code_at, low_at, unary_at = np.uint32(0), 0, 0, 0, 0
    for c in range(len(high)):
        start = c * chunk
        size = min(chunk, len(values) - start)
        most = -(-keep * size // chunk)
        v = residual[start : start + size] if len(residual) else scratch[:size]
        met = max(met, gather(values[start : start + size], residual[start : start + size], decay, v))
        if met > LARGEST_WORD:
            break
        m = chosen(v.view(np.int32), most, flags, key, groups, place)
        if m:
            mean, half, share = _magnitudes(v, place, m)
            m = m if half > 0 else 0
        if m:
            high[c], ratio[c] = half, share
            _send(v, place, m, mean, half, share, codes, code_at)
            before = -1
            for i in range(m):
                gap[i] = place[i] - before - 1
                before = place[i]
            k = _rice(gap[:m], rice_most)
            low_at, unary_at = _write_gaps(gap[:m], k, lows, low_at, unary, unary_at)
            shape[c] = k
            code_at += m
        if m == most:
            shape[c] |= 16
        else:
            counts[fewer] = m
            fewer += 1
    return met, fewer, code_at, low_at, unary_at


@compiled
def _magnitudes(v: Floats, place: np.ndarray, m: int) -> tuple[float, int, int]:
    """The mean that parts the kept values in two, and the scales of both."""
    total, over, under, highs = 0.0, 0.0, 0.0, 0
    for i in range(m):
        total += np.float64(abs(v[place[i]]))
    mean = total / m
    for i in range(m):
        size = np.float64(abs(v[place[i]]))
        above = size > mean
        over += size if above else 0.0
        under += 0.0 if above else size
        highs += np.int64(above)
    low = under / max(m - highs, 1)
    top = over / highs if highs else low
    half = scale(np.float32(top))
    return mean, half, low_share(half, np.float32(low))


@compiled
def _send(v: Floats, place: np.ndarray, m: int, mean: float, half: int, share: int, codes: Bytes, at: int) -> None:
    """Writes signs and sizes, and takes what travels off v."""
    big, small = widened(half), low_magnitude(half, share)
    for i in range(m):
        value = v[place[i]]
        negative, above = np.signbit(value), np.float64(abs(value)) > mean
        sent = big if above else small
        v[place[i]] = value - (-sent if negative else sent)
        code = (1 if negative else 0) | (2 if above else 0)
        codes[(at + i) >> 2] |= np.uint8(code << (2 * ((at + i) & 3)))


@compiled
def _rice(gap: np.ndarray, most: int) -> int:
    best, least = 0, 1 << 62
    for k in range(most + 1):
        cost = len(gap) * (k + 1)
        for i in range(len(gap)):
            cost += gap[i] >> k
        if cost < least:
            best, least = k, cost
    return best


@compiled
def _write_gaps(gap: np.ndarray, k: int, lows: Bytes, low_at: int, unary: Bytes, unary_at: int) -> tuple[int, int]:
    for i in range(len(gap)):
        low = (gap[i] & ((1 << k) - 1)) << (low_at & 7)
        at = low_at >> 3
        lows[at] |= np.uint8(low & 255)
        lows[at + 1] |= np.uint8((low >> 8) & 255)
        lows[at + 2] |= np.uint8(low >> 16)
        low_at += k
        unary_at += gap[i] >> k
        unary[unary_at >> 3] |= np.uint8(1 << (unary_at & 7))
        unary_at += 1
    return low_at, unary_at


@compiled
def _places(
    k: int, m: int, lows: Bytes, low_at: int, unary: Bytes, unary_at: int, place: np.ndarray
) -> tuple[int, int]:
    """Reads where the m values of a chunk stand, and returns how far it has read."""
    before = -1
    for i in range(m):
        zeros = 0
        while not (unary[unary_at >> 3] >> (unary_at & 7)) & 1:
            unary_at += 1
            zeros += 1
        unary_at += 1
        low, shift, at = 0, low_at & 7, low_at >> 3
        for byte in range((shift + k + 7) >> 3):
            low |= np.int64(lows[at + byte]) << (8 * byte)
        low = (low >> shift) & ((1 << k) - 1)
        low_at += k
        before += ((zeros << k) | low) + 1
        place[i] = before
    return low_at, unary_at


@compiled
def _values(codes: Bytes, at: int, m: int, half: int, share: int, value: Floats) -> None:
    big, small = widened(half), low_magnitude(half, share)
    for i in range(m):
        code = codes[(at + i) >> 2] >> (2 * ((at + i) & 3))
        size = big if code & 2 else small
        value[i] = -size if code & 1 else size


@compiled
def beyond(chunk: int, size: int, rice: Bytes, count: Counts, lows: Bytes, unary: Bytes) -> int:
    place = np.zeros(chunk, np.int64)
    low_at, unary_at, before = 0, 0, 0
    for c in range(len(count)):
        m = count[c]
        low_at, unary_at = _places(rice[c], m, lows, low_at, unary, unary_at, place)
        limit = min(chunk, size - c * chunk)
        if m and place[m - 1] >= limit:
            for i in range(m):
                if place[i] >= limit:
                    return before + i + 1
        before += m
    return 0


@compiled
def _entries(
    chunk: int,
    high: Halves,
    ratio: Bytes,
    rice: Bytes,
    count: Counts,
    codes: Bytes,
    lows: Bytes,
    unary: Bytes,
    index: Counts,
    value: Floats,
) -> None:
    at, low_at, unary_at = 0, 0, 0
    for c in range(len(count)):
        m = count[c]
        part = index[at : at + m]
        low_at, unary_at = _places(rice[c], m, lows, low_at, unary, unary_at, part)
        part += c * chunk
        _values(codes, at, m, high[c], ratio[c], value[at : at + m])
        at += m


def entries(
    chunk: int, high: Halves, ratio: Bytes, rice: Bytes, count: Counts, codes: Bytes, lows: Bytes, unary: Bytes
) -> tuple[Counts, Floats]:
    total = int(count.sum())
    index, value = np.zeros(total, np.int64), np.zeros(total, np.float32)
    _entries(chunk, high, ratio, rice, count, codes, lows, unary, index, value)
    return index, value


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
    _add(chunk, high, ratio, rice, count, codes, lows, unary, into, np.float32(weight))


@compiled
def _add(
    chunk: int,
    high: Halves,
    ratio: Bytes,
    rice: Bytes,
    count: Counts,
    codes: Bytes,
    lows: Bytes,
    unary: Bytes,
    into: Floats,
    weight: np.float32,
) -> None:
    place, value = np.zeros(chunk, np.int64), np.zeros(chunk, np.float32)
    at, low_at, unary_at = 0, 0, 0
    for c in range(len(count)):
        m = count[c]
        low_at, unary_at = _places(rice[c], m, lows, low_at, unary, unary_at, place)
        _values(codes, at, m, high[c], ratio[c], value)
        at += m
        part = into[c * chunk : (c + 1) * chunk]
        for i in range(m):
            part[place[i]] += weight * value[i]


@compiled
def squares(
    chunk: int, high: Halves, ratio: Bytes, rice: Bytes, count: Counts, codes: Bytes, lows: Bytes, unary: Bytes
) -> float:
    value = np.zeros(chunk, np.float32)
    at, total = 0, 0.0
    for c in range(len(count)):
        _values(codes, at, count[c], high[c], ratio[c], value)
        for i in range(count[c]):
            total += np.float64(value[i]) * np.float64(value[i])
        at += count[c]
    return total


@compiled
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
    place, value = np.zeros(chunk, np.int64), np.zeros(chunk, np.float32)
    at, low_at, unary_at, total = 0, 0, 0, 0.0
    for c in range(len(count)):
        m = count[c]
        low_at, unary_at = _places(rice[c], m, lows, low_at, unary, unary_at, place)
        _values(codes, at, m, high[c], ratio[c], value)
        at += m
        part = vector[c * chunk : (c + 1) * chunk]
        for i in range(m):
            total += np.float64(value[i]) * np.float64(part[place[i]])
    return total
