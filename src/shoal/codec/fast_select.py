"""The largest magnitudes of a chunk, exactly, in two looks at it.

Sorting or partitioning a chunk jumps about in it. Instead its values are dealt to 2k groups, and each group's largest
is found, which vector units do at the speed of memory. The k-th largest of those is a bound that at least k values
reach, and few more do (about 1.4k of a random chunk): only these are looked at one by one. Where it bounds nothing,
because all values are equal say, the result is the same and takes a little longer.
"""

# mypy: ignore-errors
# Types here are those that numba infers; a checker of Python's knows no 32-bit whole numbers.
from __future__ import annotations

import numpy as np

from shoal.codec.compiled import compiled

_TO_BITS = np.uint64(0x0102040810204080)
_SEQUENCE = np.uint64(0x03F79D71B4CB0A89)  # of de Bruijn: each six bits of it are others
_PLACE = np.zeros(64, np.int64)  # of the one bit of a number, by the upper six bits of its product with the sequence
for _bit in range(64):
    _PLACE[(((1 << _bit) * int(_SEQUENCE)) & (2**64 - 1)) >> 58] = _bit
_SIZE = np.int32(0x7FFFFFFF)  # all but the sign


@compiled
def chosen(
    bits: np.ndarray, most: int, flags: np.ndarray, key: np.ndarray, groups: np.ndarray, place: np.ndarray
) -> int:
    """Writes the places of the `most` largest that are not 0, rising; of equal ones the first. Returns their number.

    bits: the values as whole numbers (their magnitudes are in the same order). The others are there to write in, with
    64 places more than the values have.
    """
    n = _reaching(bits, _bound(bits, most, groups), flags, place)
    if n <= most:
        return n
    return _largest(bits, most, key, place, n)


@compiled
def _largest(bits: np.ndarray, most: int, key: np.ndarray, place: np.ndarray, n: int) -> int:
    """The largest of n places, without jumps that depend on the values."""
    for i in range(n):
        key[i] = bits[place[i]] & _SIZE
    edge = _kth(key[:n], most, 0)
    equal = most
    for i in range(n):
        equal -= key[i] > edge
    out = 0
    for i in range(n):
        tied = np.int64(key[i] == edge)
        place[out] = place[i]
        out += np.int64(key[i] > edge) + tied * np.int64(equal > 0)
        equal -= tied
    return out


@compiled
def _reaching(bits: np.ndarray, bound: int, flags: np.ndarray, place: np.ndarray) -> int:
    """The places of all that reach the bound. A byte for each value first, then 64 of them at one glance."""
    for i in range(len(bits)):
        flags[i] = np.uint8((bits[i] & _SIZE) >= bound)
    whole = (len(bits) + 63) // 64
    for i in range(len(bits), 64 * whole):
        flags[i] = 0
    words = flags.view(np.uint64)[: 8 * whole]
    n = 0
    for block in range(whole):
        found = np.uint64(0)
        for i in range(8):  # eight bytes of 0 or 1 become eight bits
            found |= ((words[8 * block + i] * _TO_BITS) >> np.uint64(56)) << np.uint64(8 * i)
        while found:
            lowest = found & (~found + np.uint64(1))
            place[n] = 64 * block + _PLACE[(lowest * _SEQUENCE) >> np.uint64(58)]
            found ^= lowest
            n += 1
    return n


@compiled
def _bound(bits: np.ndarray, most: int, groups: np.ndarray) -> int:
    """At least 1, and at least `most` values (or all that are not 0) reach it."""
    width = (2 * most + 15) // 16 * 16
    rows = len(bits) // width
    if rows < 4:
        return np.int32(1)
    best = groups[:width]
    best[:] = 0
    for row in range(rows):
        part = bits[row * width : (row + 1) * width]
        for i in range(width):
            best[i] = max(best[i], part[i] & _SIZE)
    return max(np.int32(1), _kth(best, most, 15))


@compiled
def _kth(keys: np.ndarray, k: int, lowest: int) -> int:
    """The k-th largest, or what is left of it without its bits below `lowest`."""
    found = np.int32(0)
    for bit in range(30, lowest - 1, -1):
        tried = np.int32(found | (1 << bit))
        reach = 0
        for i in range(len(keys)):
            reach += keys[i] >= tried
        if reach >= k:
            found = tried
    return found
