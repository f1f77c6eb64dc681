"""Which steps of a journal count, and which were undone, and by what.

A *life* is a stretch in which steps follow one another: an attempt (of a fleet of islands: one life of it), or what
follows a `rewind` within one. A later life undoes every step after the one that it goes on from.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from shoal.journal.columns import Array
from shoal.journal.journal import Record
from shoal.journal.reading import CHUNK, Told
from shoal.observe.faults import NOBODY, Fault

Life = tuple[int, int]  # attempt, rewinds within it
Others = Sequence[tuple[int, Record]]  # as `Told.others` gives them

_NEVER = 1 << 62
_OF_A_LIFE = ("start", "eval", "tasks", "samples", "checkpoint", "checkpoint_failed", "skip", "rewind")


class Lives:
    """Steps are known by their row, other records by themselves."""

    def __init__(self, told: Told, others: Others) -> None:
        self._told = told
        self._of: dict[int, Life] = {}
        self._limits: dict[Life, int] = {}  # the life went on from this step, or one before it
        self._begins: dict[Life, int] = {}  # number of its first record
        self._order: dict[int, int] = {}
        self.pieces: list[tuple[int, int, Life]] = []  # rows from … to, of one life
        self._places = [place for place, _ in others]
        self._walk(others)
        for begin, end, life in self.pieces:  # also without a `start`: a step that is done proves that it is done
            lowest = min(int(told.column("step", a, b).min()) for a, b in chunks(begin, end))
            self._limit(life, lowest - 1)
        self.again = self._told_again()
        self._kept: dict[Life, int] = {}
        limit = _NEVER
        for life in sorted(self._limits, reverse=True):
            self._kept[life] = limit
            limit = min(limit, self._limits[life])

    def _walk(self, others: Others) -> None:
        rewinds: dict[int, int] = {}
        at = 0
        for i, (place, record) in enumerate(others):
            self._order[id(record)] = place + i
            kind = record.get("kind")
            if kind not in _OF_A_LIFE:
                continue
            attempt = int(record.get("attempt", 0))
            if kind == "rewind":
                self._take(at, place, rewinds)
                at = place
                rewinds[attempt] = rewinds.get(attempt, 0) + 1
            life = self._of[id(record)] = (attempt, rewinds.get(attempt, 0))
            self._begin(life, place + i)
            if kind in ("start", "rewind"):
                self._limit(life, int(record.get("to" if kind == "rewind" else "step", 0) or 0))
        self._take(at, self._told.rows, rewinds)

    def _take(self, begin: int, end: int, rewinds: dict[int, int]) -> None:
        """Rows between two rewinds."""
        for a, b in chunks(begin, end):
            attempts = self._told.column("attempt", a, b)
            edges = [0, *(np.flatnonzero(np.diff(attempts)) + 1).tolist(), b - a]
            for first, last in itertools.pairwise(edges):
                attempt = max(0, int(attempts[first]))
                life = (attempt, rewinds.get(attempt, 0))
                if self.pieces and self.pieces[-1][1:] == (a + first, life):
                    self.pieces[-1] = (self.pieces[-1][0], a + last, life)
                else:
                    self.pieces.append((a + first, a + last, life))
                    self._begin(life, a + first + bisect.bisect_right(self._places, a + first))

    def _told_again(self) -> Array:
        """Rows of steps of islands that were told before in the same life, by a first member that had been stopped; the
        first one counts."""
        found = [np.empty(0, np.int64)]
        if not self._told.has("epoch"):
            return found[0]
        by_life: dict[Life, list[tuple[int, int]]] = {}
        for begin, end, life in self.pieces:
            by_life.setdefault(life, []).append((begin, end))
        for ranges in by_life.values():
            epochs = np.concatenate([self._told.column("epoch", a, b) for a, b in ranges])
            if (epochs < 0).all():
                continue
            steps = np.concatenate([self._told.column("step", a, b) for a, b in ranges])
            if (np.diff(steps) > 0).all():
                continue
            rows = np.concatenate([np.arange(a, b) for a, b in ranges])
            first = np.zeros(len(steps), bool)
            first[np.unique(steps, return_index=True)[1]] = True
            found.append(rows[~first & (epochs >= 0)])
        return np.sort(np.concatenate(found))

    def is_again(self, begin: int, end: int) -> Array:
        """Of the rows from `begin` to `end`, which were told before."""
        told = np.zeros(end - begin, bool)
        a, b = np.searchsorted(self.again, [begin, end])
        told[self.again[a:b] - begin] = True
        return told

    def of_rows(self, begin: int, end: int) -> Iterator[tuple[int, int, Life]]:
        """The pieces between two rows."""
        first = max(0, bisect.bisect_right(self.pieces, (begin, _NEVER)) - 1)
        for a, b, life in self.pieces[first:]:
            if a >= end:
                return
            if b > begin:
                yield max(a, begin), min(b, end), life

    def has(self, record: Record) -> bool:
        """Whether it is one that belongs to a life; others are remarks, or of a newer Shoal."""
        return id(record) in self._of

    def of(self, record: Record) -> Life:
        return self._of[id(record)]

    def kept(self, life: Life) -> int:
        """The last step of it that no later life did again."""
        return self._kept.get(life, _NEVER)

    def lost_steps(self) -> Iterator[tuple[Life, Array]]:
        """Steps that were done again, each once a life."""
        found: dict[Life, list[Array]] = {}
        for begin, end, life in self.pieces:
            for a, b in chunks(begin, end):
                steps = self._told.column("step", a, b)
                if (undone := steps[steps > self.kept(life)]).size:
                    found.setdefault(life, []).append(undone)
        for life, parts in found.items():
            yield life, np.unique(np.concatenate(parts))

    def owners(self, faults: list[Fault]) -> Owners:
        lives, before, since = sorted(self._limits), dict.fromkeys(self._limits, NOBODY), 0
        places = [self._order[id(fault.record)] for fault in faults]
        for life in lives:  # a life that began without a fault before it: somebody had stopped the run
            place = self._begins[life]
            here = [n for n in range(len(faults)) if since <= places[n] < place + (life[1] > 0)]  # a rewind is its own
            before[life], since = here[-1] if here else NOBODY, place
        return Owners(lives, self._limits, before)

    def _begin(self, life: Life, order: int) -> None:
        self._begins[life] = min(order, self._begins.get(life, order))

    def _limit(self, life: Life, step: int) -> None:
        self._limits[life] = min(self._limits.get(life, _NEVER), step)


class Owners:
    """Says which fault undid a step of a life: the last one before the life that went on from an earlier step."""

    def __init__(self, lives: list[Life], limits: dict[Life, int], before: dict[Life, int]) -> None:
        self._lives, self._limits, self._before = lives, limits, before

    def __call__(self, life: Life, step: int) -> int:
        return int(self.many(life, np.array([step]))[0])

    def many(self, life: Life, steps: Array) -> Array:
        found = np.full(len(steps), NOBODY)
        open_ = np.ones(len(steps), bool)
        for later in self._lives[bisect.bisect_right(self._lives, life) :]:
            undone = open_ & (steps > self._limits[later])
            found[undone] = self._before[later]
            open_ &= ~undone
            if not open_.any():
                break
        return found


def chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    return ((a, min(end, a + CHUNK)) for a in range(begin, end, CHUNK))
