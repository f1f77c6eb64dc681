"""Sets of whole numbers as sorted ranges [a, b): positions in the order of the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.values import BadValue

Range = tuple[int, int]
Ranges = tuple[Range, ...]
MOST = 1 << 62


def union(*many: Iterable[Sequence[int]]) -> Ranges:
    """Sorted, joined where they touch, without empty ones."""
    joined: list[list[int]] = []
    for a, b in sorted((a, b) for some in many for a, b in some if a < b):
        if joined and a <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], b)
        else:
            joined.append([a, b])
    return tuple((a, b) for a, b in joined)


def minus(all_of: Iterable[Sequence[int]], without: Iterable[Sequence[int]]) -> Ranges:
    left: list[Range] = []
    away = union(without)
    at = 0
    for a, b in union(all_of):
        while at < len(away) and away[at][1] <= a:
            at += 1
        i = at
        while a < b and i < len(away) and away[i][0] < b:
            if a < away[i][0]:
                left.append((a, away[i][0]))
            a = max(a, away[i][1])
            i += 1
        if a < b:
            left.append((a, b))
    return tuple(left)


def count(some: Iterable[Sequence[int]]) -> int:
    return sum(b - a for a, b in some)


def first(some: Iterable[Sequence[int]], n: int) -> Ranges:
    """The first `n` of them."""
    taken: list[Range] = []
    for a, b in union(some):
        if n <= 0:
            break
        taken.append((a, min(b, a + n)))
        n -= taken[-1][1] - a
    return tuple(taken)


def within(some: Iterable[Sequence[int]], whole: Iterable[Sequence[int]]) -> bool:
    return not minus(some, whole)


def parse(said: object, most: int = 1 << 16) -> Ranges:
    """From JSON of a stranger. BadValue for anything that is no list of disjoint, sorted ranges."""
    if not isinstance(said, list) or len(said) > most:
        raise BadValue("no list of ranges, or too long a one")
    found: list[Range] = []
    for item in said:
        if not (isinstance(item, list) and len(item) == 2 and all(type(n) is int for n in item)):
            raise BadValue("a range that is no pair of whole numbers")
        a, b = item
        if not 0 <= a < b <= MOST or (found and a <= found[-1][1]):
            raise BadValue("a range that is empty or out of order")
        found.append((a, b))
    return tuple(found)
