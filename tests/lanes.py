"""Which files of tests run side by side: the longest first, and as many as fill the cores.

As many as there are lanes run at any time. Where these mostly wait, more are let in beside them, as long as all
together are known to need no more than the cores. What uses a service that there is only one of (the mark `uses`) is
never beside something else that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from tests.durations import Took, typical

KINDS = ("slow", "cluster", "alone")  # what of a file is recorded apart, since it is run apart


@dataclass
class Work:
    """Tests of one file that run in one process."""

    name: str
    items: list[pytest.Item]
    took: Took
    known: bool
    uses: frozenset[str]


def works(items: Iterable[pytest.Item], known: Mapping[str, Took]) -> list[Work]:
    """In the order in which to begin them: what was never recorded, then the longest first."""
    of_name: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_name.setdefault(name_of(item), []).append(item)
    usual = typical(known)
    found = [
        Work(name, own, known.get(name, usual), name in known, frozenset(_uses(own))) for name, own in of_name.items()
    ]
    return sorted(found, key=lambda work: (work.known, -work.took.wall_s))


def name_of(item: pytest.Item) -> str:
    file = item.nodeid.split("::")[0]
    return " ".join([file, *(kind for kind in KINDS if item.get_closest_marker(kind))])


def _uses(items: Iterable[pytest.Item]) -> Iterable[str]:
    return (name for item in items for mark in item.iter_markers("uses") for name in mark.args)


def next_of(waiting: Sequence[Work], running: Sequence[Work], lanes: int, cores: int) -> Work | None:
    """The one to begin now, if any. One of those running need not be known: it then counts as a whole core."""
    taken = frozenset[str]().union(*(work.uses for work in running))
    possible = [work for work in waiting if not work.uses & taken]
    if len(running) < lanes:
        return possible[0] if possible else None
    if lanes == 1 or len(running) >= 2 * lanes:
        return None
    left = cores - sum(work.took.share for work in running)
    return next((work for work in possible if work.took.share <= left), None)
