"""Which files of tests run side by side: the longest first, and as many as fill the cores.

As many as there are lanes run at any time. While these leave a core idle, because they wait, another is let in beside
them that is known to need no more than what is idle: never on a machine that is busy with something else. What uses a
service that there is only one of (the mark `uses`) is never beside something else that does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def next_of(waiting: Sequence[Work], running: Sequence[Work], lanes: int, idle_cores: float) -> Work | None:
    """The one to begin now, if any."""
    taken = frozenset[str]().union(*(work.uses for work in running))
    possible = [work for work in waiting if not work.uses & taken]
    if len(running) < lanes:
        return possible[0] if possible else None
    if lanes == 1 or len(running) >= 2 * lanes:
        return None
    return next((work for work in possible if work.took.share <= idle_cores), None)


class Idle:
    """How many of our cores did nothing of late, or nothing but what is told to make room for others (`nice`). Asked
    again before a second has passed, it does not know yet: none."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._names = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        self._at, self._idle_s = time.monotonic(), self._read()

    def cores(self) -> float:
        now = time.monotonic()
        if now - self._at < 1.0:
            return 0.0
        before_s, self._idle_s = self._idle_s, self._read()
        before, self._at = self._at, now
        return (self._idle_s - before_s) / (now - before)

    def _read(self) -> float:
        ticks = 0
        for line in self._stat.read_text().splitlines():
            name, *numbers = line.split()
            if name in self._names:
                ticks += sum(int(numbers[i]) for i in (1, 3, 4))  # niced; idle; idle while a disk works
        return ticks / os.sysconf("SC_CLK_TCK")
