"""The order of the data: a pure function from (seed, position) to a sample, for any position, without state or replay.

One source: each epoch is a keyed permutation of its windows. A mixture: positions fall into blocks with a fixed count a
source (`shoal.data.mixture`), each block is shuffled by a key, and every source walks its own epochs.

The permutation is a Feistel network over two digits, x = left + a·right with a·b just above n, and cycle walking for
the few values past n (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). No table: n may be 2^48.
The values are a promise, pinned by a test: a run resumed by a later Shoal reads what the earlier one would have read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.data.mixture import quotas
from shoal.errors import SpecError

U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]

ROUNDS = 8
LARGEST = 1 << 62  # so that a·b and every sum below stay inside 64 bits
_GAMMA = 0x9E3779B97F4A7C15  # the golden ratio: splitmix64's increment
_ROUND_GAMMAS = np.array([[_GAMMA * (i + 1) % 2**64] for i in range(ROUNDS)], np.uint64)  # [ROUNDS, 1]
_SAMPLES, _BLOCKS = 1, 2  # two uses of the seed that must not share keys


class Order:
    """Which window of which source stands at each position. The same for every world size and batch size."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        if len(sizes) != len(weights) or not sizes:
            raise ValueError("there is one weight a source and at least one source")
        if not all(1 <= n < LARGEST for n in sizes):
            raise SpecError(f"every source needs at least one window, and the sources have {list(sizes)}.")
        self.sizes = tuple(int(n) for n in sizes)
        self.seed = seed
        self.quotas = quotas(weights)
        # One row a source, so that a batch from many sources is still one vector computation.
        self._n = np.array(self.sizes, np.uint64)
        self._a, self._b = np.array([_radices(n) for n in self.sizes], np.uint64).T
        self._keys = np.concatenate([_fold(_fold(_key(seed), _SAMPLES), k) for k in range(len(sizes))])
        self._block_key = _fold(_key(seed), _BLOCKS)
        self._quota = np.array(self.quotas.counts, np.uint64)
        self._ends = np.cumsum(self._quota)

    def at(self, position: int, count: int) -> tuple[I64, I64]:
        """The sources and windows at positions [position, position + count). Step t of batch B is `at(t * B, B)`."""
        if position < 0 or count < 0:
            raise ValueError(f"there is no position {position} (count {count})")
        return self.pick(np.arange(position, position + count, dtype=np.uint64))

    def pick(self, positions: U64) -> tuple[I64, I64]:
        """The sources and windows at any positions: many at once cost little more than one."""
        if len(self.sizes) == 1:
            source = np.zeros(1, np.int64)  # broadcasts
            nth = positions
        else:
            source, nth = self._deal(positions)
        n = self._n[source]
        epoch = nth // n
        if len(source) == 1 and epoch.size and epoch.min() == epoch.max():
            epoch = epoch[:1]  # one key for all of them: the usual case
        key = _fold(self._keys[source], epoch)
        window = _permute(nth % n, n, self._a[source], self._b[source], key)
        return np.broadcast_to(source, positions.shape).astype(np.int64), window.astype(np.int64)

    def _deal(self, positions: U64) -> tuple[I64, U64]:
        """For each position of a mixture: the source, and how many samples of that source come before this one."""
        size = self.quotas.block
        block = positions // np.uint64(size)
        n, a, b = (np.array([v], np.uint64) for v in (size, *_radices(size)))
        seat = _permute(positions % n, n, a, b, _fold(self._block_key, block))
        source = np.searchsorted(self._ends, seat, side="right")
        quota = self._quota[source]
        return source, block * quota + (seat - (self._ends[source] - quota))


def _radices(n: int) -> tuple[int, int]:
    """a = ⌈√n⌉ and b = ⌈n/a⌉: the domain a·b is less than n + a, so that walking is rare."""
    a = math.isqrt(n - 1) + 1
    return a, -(-n // a)


def _permute(x: U64, n: U64, a: U64, b: U64, key: U64) -> U64:
    """Where x goes in the permutation of range(n) that `key` names. All arguments are [count] or [1]."""
    round_keys = list(_mix(key + _ROUND_GAMMAS))
    y = _feistel(x, a, b, round_keys)
    while True:
        outside = np.flatnonzero(y >= n)
        if not outside.size:
            return y
        # Walk the cycle until it comes back inside: still a bijection, as every x inside starts such a walk.
        y[outside] = _feistel(y[outside], _pick(a, outside), _pick(b, outside), [_pick(k, outside) for k in round_keys])


def _feistel(x: U64, a: U64, b: U64, round_keys: Sequence[U64]) -> U64:
    left, right = x % a, x // a
    for i, key in enumerate(round_keys):
        # Adding a function of the other digit can be undone, whatever the function: that makes it a permutation.
        if i % 2 == 0:
            left = (left + (_mix(right + key) >> np.uint64(1))) % a  # halved: the sum must not wrap
        else:
            right = (right + (_mix(left + key) >> np.uint64(1))) % b
    return left + a * right


def _pick(values: U64, where: npt.NDArray[Any]) -> U64:
    return values if len(values) == 1 else values[where]


def _key(seed: int) -> U64:
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))


def _fold(key: U64, value: int | U64) -> U64:
    """A key that depends on `key` and `value`, and looks unrelated to both."""
    return _mix((key ^ _mix(np.atleast_1d(np.asarray(value, np.uint64)) + np.uint64(_GAMMA))) + np.uint64(_GAMMA))


def _mix(z: U64) -> U64:
    """splitmix64's finaliser: each bit in flips each bit out with probability one half. Arrays wrap, as meant."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
