"""The time line of one session: its steps by column, and how long each label holds on it.

Nearly all steps of a run lie between their neighbours and touch nothing else. Those are summed by column; the others,
near a failure, a save or a clock that was set back, go through a sweep over all edges. Both give the same sums, to the
microsecond: which of the two a step takes is a matter of speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shoal.journal.columns import Array
from shoal.journal.reading import Told
from shoal.observe.faults import NOBODY
from shoal.observe.gaps import Gaps, Span, all_us, us
from shoal.observe.lives import Lives, Others, Owners, chunks

PRECEDENCE = (
    *("training", "lost", "data_wait", "evaluation", "detection", "recovery", "checkpoint", "startup", "stopping"),
    "other",
)
_RANK = {part: i for i, part in enumerate(PRECEDENCE)}
_NEVER = -(1 << 62)  # a step that does not say when it began
_LATER = 1 << 62


class Session:
    """Rows `first` to `last` of the journal, and the records between them."""

    def __init__(self, told: Told, others: Others, first: int, last: int) -> None:
        self.told, self.others, self.first, self.last = told, others, first, last
        self.ends = np.empty(last - first, np.int64)  # µs
        silent = False
        for a, b in chunks(first, last):
            self.ends[a - first : b - first] = all_us(told.column("t", a, b))
            silent = silent or bool(np.isnan(told.column("begin", a, b)).any())
        # Rows that say when they began; None: all of them.
        self._begun = np.flatnonzero(~np.isnan(told.column("begin", first, last))) + first if silent else None

    def begins(self, a: int, b: int) -> Array:
        """µs, of the rows from `a` to `b`."""
        begins = self.told.column("begin", a, b)
        return np.where(np.isnan(begins), _NEVER, all_us(np.nan_to_num(begins)))

    def bounds(self, following: Session | None, now: float | None, before: int | None) -> tuple[int, int]:
        """From when its process was started. A clock that was set back must not make a session longer than the time
        until the next one began, and none begins before the last one's end (`before`)."""
        begin, end = self._start(), max((us(r["t"]) for _, r in self.others), default=_NEVER)
        if self.ends.size:
            end = max(end, int(self.ends.max()))
        if self._opens_with_other() and self.others[0][1].get("began") is not None:
            began = us(self.others[0][1]["began"])
            begin = min(begin, began if before is None else max(began, before))
        if following is not None:
            end = min(end, max(begin, following._start()))
        elif now is not None and not any(record["kind"] == "close" for _, record in self.others):
            end = max(end, us(now))
        return begin, max(begin, end)

    def turns(self) -> Iterator[tuple[int, int, int]]:
        """(i, first row, last row): the steps before the other record `i`; at the end those after all of them."""
        at = self.first
        for i, (place, _) in enumerate(self.others):
            yield i, at, place
            at = place
        yield len(self.others), at, self.last

    def reached(self, first: int, last: int, at: int, end: int) -> int:
        """The end of those steps, on a clock that only goes forward from `at` to `end`."""
        return min(max(at, int(self.ends[first - self.first : last - self.first].max())), end)

    def about(self, first: int, last: int, at: int, end: int, label: str, owner: int) -> Iterator[Span]:
        """What holds while those steps are not taken: before the first of them, and where a stop was asked for before
        each."""
        begun = self._first_begun(first, last)
        if begun is None:
            yield at, self.reached(first, last, at, end), label, owner
            return
        last = last if label == "stopping" else begun + 1
        taken = self.ends[first - self.first : last - self.first]
        ends = np.minimum(np.maximum.accumulate(np.maximum(taken, at)), end)
        before = np.concatenate(([at], ends[:-1]))
        begins = self.begins(first, last)
        began = np.where(begins == _NEVER, ends, np.minimum(np.maximum(begins, before), ends))
        for a, b in zip(before.tolist(), began.tolist(), strict=True):
            yield a, b, label, owner

    def last_begun(self, first: int, last: int) -> int | None:
        """The last of those rows that says when it began."""
        if self._begun is None:
            return last - 1 if last > first else None
        i = int(np.searchsorted(self._begun, last)) - 1
        return int(self._begun[i]) if i >= 0 and self._begun[i] >= first else None

    def last_work(self) -> tuple[int, int]:
        """The last record of all that says when it began: (its place among the others, -1) or (-1, its row)."""
        row = self.last_begun(self.first, self.last)
        other = max((i for i, (_, record) in enumerate(self.others) if "begin" in record), default=-1)
        if row is not None and (other < 0 or self.others[other][0] <= row):
            return -1, row
        return other, -1

    def _first_begun(self, first: int, last: int) -> int | None:
        if self._begun is None:
            return first
        i = int(np.searchsorted(self._begun, first))
        return int(self._begun[i]) if i < len(self._begun) and self._begun[i] < last else None

    def _opens_with_other(self) -> bool:
        return bool(self.others) and self.others[0][0] == self.first

    def _start(self) -> int:
        return us(self.others[0][1]["t"]) if self._opens_with_other() else int(self.ends[0])


def measure(
    session: Session, lives: Lives, owners: Owners, gaps: Gaps, spans: list[Span], begin: int, end: int
) -> Iterator[tuple[str, int, int]]:
    """(label, whose, µs) of everything but `other`. `spans` are of all that is no step."""
    steps = _Steps(session, lives, gaps, begin, end)
    mixed = _Spans()
    mixed.add_all(spans)
    shortest: list[int] = []  # of each chunk, when its first step began
    for a, b in steps.chunks():
        since, to, _, counts = steps.of(a, b)
        steps.lost(a, b, since, to, owners, mixed)
        shortest.append(int(since[counts].min()) if counts.any() else _LATER)
    for row in steps.gap_rows:
        mixed.add_all(steps.split(row))
    busy = mixed.union()
    sums = {"training": 0, "data_wait": 0}
    reached = begin
    for i, (a, b) in enumerate(steps.chunks()):
        since, to, waited, counts = steps.of(a, b)
        since, to, waited = since[counts], to[counts], waited[counts]
        if not since.size:
            continue
        furthest = np.maximum.accumulate(np.concatenate(([reached], to)))
        next_begin = np.minimum.accumulate(np.concatenate(([min(shortest[i + 1 :], default=_LATER)], since[::-1])))
        alone = (furthest[:-1] <= since) & (next_begin[-2::-1] >= to) & ~_touch(busy, since, to)
        reached = int(furthest[-1])
        sums["data_wait"] += int((waited - since)[alone].sum())
        sums["training"] += int((to - waited)[alone].sum())
        mixed.add(since[~alone], waited[~alone], "data_wait")
        mixed.add(waited[~alone], to[~alone], "training")
    for label, duration in sums.items():
        yield label, NOBODY, duration
    yield from mixed.sweep()


class _Steps:
    """What the steps of a session say was done."""

    def __init__(self, session: Session, lives: Lives, gaps: Gaps, begin: int, end: int) -> None:
        self._session, self._lives, self._gaps, self._begin, self._end = session, lives, gaps, begin, end
        first, last = session.first, session.last
        self.gap_rows = [row for row in sorted(gaps) if first <= row < last and self._in_sight(row)]
        self._has_data = session.told.has("time.data_s")

    def chunks(self) -> Iterator[tuple[int, int]]:
        return chunks(self._session.first, self._session.last)

    def of(self, a: int, b: int) -> tuple[Array, Array, Array, Array]:
        """Begin, end, end of the wait for data, and whether it counts and is whole."""
        session, rows = self._session, slice(a - self._session.first, b - self._session.first)
        to = np.clip(session.ends[rows], self._begin, self._end)
        since = np.minimum(np.maximum(session.begins(a, b), self._begin), to)
        waited = since
        if self._has_data:
            data = all_us(np.nan_to_num(session.told.column("time.data_s", a, b)))
            waited = np.minimum(to, since + np.maximum(0, data))
        counts = self._seen(a, b) & ~self._undone(a, b)
        counts[[row - a for row in self.gap_rows if a <= row < b]] = False
        return since, to, waited, counts

    def lost(self, a: int, b: int, since: Array, to: Array, owners: Owners, into: _Spans) -> None:
        undone = self._seen(a, b) & self._undone(a, b)
        if not undone.any():
            return
        steps = self._session.told.column("step", a, b)
        for first, last, life in self._lives.of_rows(a, b):
            rows = np.flatnonzero(undone[first - a : last - a]) + first - a
            if rows.size:
                into.add(since[rows], to[rows], "lost", owners.many(life, steps[rows]))

    def split(self, row: int) -> Iterator[Span]:
        """A step before whose end lies what an island's fault has cost the others."""
        since, to, waited, _ = (int(values[0]) for values in self.of(row, row + 1))
        yield since, waited, "data_wait", NOBODY
        for a, b, label, owner in self._gaps[row]:
            a, b = min(max(a, self._begin), to), min(max(b, self._begin), to)
            yield a, b, label, owner
            yield waited, a, "training", NOBODY
            waited = max(waited, b)
        yield waited, to, "training", NOBODY

    def _seen(self, a: int, b: int) -> Array:
        return (self._session.begins(a, b) != _NEVER) & ~self._lives.is_again(a, b)

    def _undone(self, a: int, b: int) -> Array:
        kept = np.empty(b - a, np.int64)
        for first, last, life in self._lives.of_rows(a, b):
            kept[first - a : last - a] = self._lives.kept(life)
        return self._session.told.column("step", a, b) > kept

    def _in_sight(self, row: int) -> bool:
        return bool(self._seen(row, row + 1)[0] and not self._undone(row, row + 1)[0])


class _Spans:
    """Spans that may lie over one another."""

    def __init__(self) -> None:
        self._parts: list[tuple[Array, Array, Array, Array]] = []

    def add(self, begins: Array, ends: Array, label: str, owners: Array | None = None) -> None:
        some = begins < ends
        if some.any():
            whose = np.full(len(begins), NOBODY) if owners is None else owners
            self._parts.append((begins[some], ends[some], np.full(int(some.sum()), _RANK[label]), whose[some]))

    def add_all(self, spans: Sequence[Span] | Iterator[Span]) -> None:
        some = [(a, b, _RANK[label], owner) for a, b, label, owner in spans if a < b]
        if some:
            begins, ends, ranks, owners = (np.array(column, np.int64) for column in zip(*some, strict=True))
            self._parts.append((begins, ends, ranks, owners))

    def union(self) -> tuple[Array, Array]:
        """Where any of them is, as stretches in order that do not meet."""
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        begins, ends = (np.concatenate([part[i] for part in self._parts]) for i in (0, 1))
        order = np.argsort(begins, kind="stable")
        begins, furthest = begins[order], np.maximum.accumulate(ends[order])
        new = np.concatenate(([True], begins[1:] > furthest[:-1]))
        return begins[new], furthest[np.concatenate((new[1:], [True]))]

    def sweep(self) -> Iterator[tuple[str, int, int]]:
        """Each piece of time between two edges goes to the label that takes precedence there; within a label, to the
        lowest owner."""
        if not self._parts:
            return
        begins, ends, ranks, owners = (np.concatenate([part[i] for part in self._parts]) for i in range(4))
        edges = np.unique(np.concatenate((begins, ends)))
        lengths = np.diff(edges)
        first, last = np.searchsorted(edges, begins), np.searchsorted(edges, ends)
        free = np.ones(len(lengths), bool)
        order = np.lexsort((owners, ranks))
        first, last, ranks, owners = first[order], last[order], ranks[order], owners[order]
        groups = np.flatnonzero(np.diff(ranks) | np.diff(owners)) + 1
        for a, b in zip([0, *groups.tolist()], [*groups.tolist(), len(ranks)], strict=True):
            low, high = int(first[a:b].min()), int(last[a:b].max())  # what is a fault's is near to it
            change = np.bincount(first[a:b] - low, minlength=high - low + 1)
            change -= np.bincount(last[a:b] - low, minlength=high - low + 1)
            taken = free[low:high] & (np.cumsum(change)[:-1] > 0)
            if duration := int(lengths[low:high][taken].sum()):
                yield PRECEDENCE[ranks[a]], int(owners[a]), duration
            free[low:high] &= ~taken


def _touch(busy: tuple[Array, Array], since: Array, to: Array) -> Array:
    """Which of these stretches meet one that is busy."""
    begins, ends = busy
    if not begins.size:
        return np.zeros(len(since), bool)
    place = np.searchsorted(ends, since, side="right")  # the first that ends after it began
    return (place < len(begins)) & (begins[np.minimum(place, len(begins) - 1)] < to)
