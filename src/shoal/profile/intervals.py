"""Interval arithmetic: who is at work at each instant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Lasts(Protocol):
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...


Any_ = TypeVar("Any_", bound=Lasts)


def sweep(spans: Iterable[Any_], begin: int, end: int) -> Iterator[tuple[int, int, list[Any_]]]:
    """Cuts [begin, end) where a span begins or ends: (from, to, those at work), without holes, in order."""
    edges: list[tuple[int, int, int, Any_]] = []
    for i, span in enumerate(spans):
        if span.end > begin and span.begin < end and span.end > span.begin:
            edges.append((max(begin, span.begin), 1, i, span))
            edges.append((min(end, span.end), 0, i, span))
    edges.sort(key=lambda edge: edge[:3])
    active: dict[int, Any_] = {}
    at = begin
    for t, starts, i, span in edges:
        if t > at:
            yield at, t, list(active.values())
            at = t
        if starts:
            active[i] = span
        else:
            active.pop(i, None)
    if end > at:
        yield at, end, list(active.values())
