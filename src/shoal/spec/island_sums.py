"""Sums in an order that does not depend on who adds: a fixed binary tree over the shards of a step.

Floating-point sums depend on their order. Here a node of the tree is always the sum of its two halves, whoever holds
them and whenever they come, so the root is the same bits for any members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Node = tuple[int, int]  # shards from, up to (without the last)
T = TypeVar("T")


def halves(node: Node) -> tuple[Node, Node]:
    """The left half is the largest power of two that leaves something to the right one."""
    low, high = node
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def path(shard: int, shards: int) -> list[Node]:
    """The nodes that a shard is part of, from the root to its leaf."""
    node, found = (0, shards), [(0, shards)]
    while node[1] - node[0] > 1:
        left, right = halves(node)
        node = left if shard < left[1] else right
        found.append(node)
    return found


def cover(have: Iterable[int], shards: int) -> list[Node]:
    """The fewest nodes that hold exactly these shards, in order."""
    have = set(have)

    def within(node: Node) -> list[Node]:
        present = sum(k in have for k in range(*node))
        if present == node[1] - node[0]:
            return [node]
        return [] if not present else [n for half in halves(node) for n in within(half)]

    return within((0, shards))


class Forest(Generic[T]):
    """Partial sums by node; two halves become their whole as soon as both are there."""

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        """`add` may use its first argument for the sum."""
        self._shards, self._add = shards, add
        self.sums: dict[Node, T] = {}

    def plant(self, node: Node, value: T) -> None:
        above = path(node[0], self._shards)
        above = above[: above.index(node)]
        while above:
            left, right = halves(above[-1])
            other = right if node == left else left
            if other not in self.sums:
                break
            held = self.sums.pop(other)
            value = self._add(value, held) if node == left else self._add(held, value)
            node = above.pop()
        self.sums[node] = value

    def root(self) -> T | None:
        """The sum over all shards, once all are there."""
        return self.sums.get((0, self._shards))
