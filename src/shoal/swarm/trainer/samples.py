"""The samples of a round: ranges that a peer may use, taken in order, a step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shoal.data.order import U64

Range = tuple[int, int]  # [a, b)


class Samples:
    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._left: list[Range] = []
        self.used: list[Range] = []
        self.more(ranges)

    def more(self, ranges: Iterable[Sequence[int]]) -> None:
        self._left += [(int(a), int(b)) for a, b in ranges if a < b]

    @property
    def left(self) -> int:
        return sum(b - a for a, b in self._left)

    def peek(self, count: int, skip: int = 0) -> list[Range]:
        """The next `count` after the next `skip`, or as many as there are."""
        found = []
        for a, b in self._left:
            a, skip = min(b, a + skip), max(0, skip - (b - a))
            if a < b and count > 0:
                found.append((a, min(b, a + count)))
                count -= found[-1][1] - a
        return found

    def take(self, count: int) -> list[Range]:
        taken = self.peek(count)
        for a, b in taken:
            first, last = self._left[0]
            assert first == a
            self._left[:1] = [(b, last)] if b < last else []
            joins = bool(self.used) and self.used[-1][1] == a
            self.used[-1:] = [(self.used[-1][0], b)] if joins else [*self.used[-1:], (a, b)]
        return taken


def positions(ranges: Iterable[Sequence[int]]) -> U64:
    return np.concatenate([np.arange(a, b, dtype=np.uint64) for a, b in ranges] or [np.empty(0, np.uint64)])


def count(ranges: Iterable[Sequence[int]]) -> int:
    return sum(b - a for a, b in ranges)
