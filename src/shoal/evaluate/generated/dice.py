"""Draws that are the same on every machine and in every version of Python."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Of one item: what it shows depends on these names alone, not on the items before it."""

    def __init__(self, *names: object) -> None:
        told = hashlib.sha256("\n".join(map(str, names)).encode()).digest()
        self._random = random.Random(int.from_bytes(told, "big"))

    def below(self, count: int) -> int:
        # Of Python's generator only `random()` is promised to stay the same.
        return int(self._random.random() * count)

    def between(self, low: int, high: int) -> int:
        """Both of them are possible."""
        return low + self.below(high - low + 1)

    def one(self, among: Sequence[T]) -> T:
        return among[self.below(len(among))]

    def some(self, among: Sequence[T], count: int) -> list[T]:
        """Different ones, in any order."""
        left = list(among)
        return [left.pop(self.below(len(left))) for _ in range(count)]
