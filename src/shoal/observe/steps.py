"""Some steps of a journal, and what is reckoned from all of them at once: columns in, one number out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.journal.columns import Array
from shoal.journal.journal import Record
from shoal.journal.reading import Told
from shoal.observe.throughput import FIRST

_HALF = 31  # bits


class Steps:
    """`rows` are those of the journal; None: all of them, in order."""

    def __init__(self, told: Told, rows: Array | None = None) -> None:
        self.told = told
        self._rows = rows

    def __len__(self) -> int:
        return self.told.rows if self._rows is None else len(self._rows)

    @property
    def rows(self) -> Array:
        return np.arange(self.told.rows) if self._rows is None else self._rows

    def column(self, name: str) -> Array:
        whole = self.told.column(name)
        return whole if self._rows is None else whole[self._rows]

    def last(self, name: str) -> Any:
        """That field of the last of them, which there must be."""
        row = self.told.rows - 1 if self._rows is None else int(self._rows[-1])
        return self.told.column(name, row, row + 1)[0].item()

    def only(self, which: Array) -> Steps:
        """Those for which it is true."""
        if which.all():
            return self
        return Steps(self.told, np.flatnonzero(which) if self._rows is None else self._rows[which])

    def newest(self, count: int) -> Steps:
        return Steps(self.told, self.rows[-count:])

    def duration_s(self) -> Array:
        """As `throughput.duration_s` of each."""
        took = self.column("t")
        took -= self.column("begin")
        np.nan_to_num(took, copy=False, nan=0.0)
        return np.maximum(took, 0.0, out=took)

    def each_s(self) -> Array:
        """Of one step, where a record may stand for several, since the one before it."""
        taken, attempts = np.diff(self.column("step"), prepend=0), self.column("attempt")
        taken[np.diff(attempts, prepend=attempts[:1] - 1) != 0] = 1
        return self.duration_s() / np.maximum(taken, 1)

    def tokens_per_s(self) -> Array:
        return _over(self.column("tokens"), self.duration_s())

    def total_tokens(self) -> int:
        """Exact, also where the sum does not fit into 64 bits."""
        tokens = self.column("tokens")
        return (int((tokens >> _HALF).sum()) << _HALF) + int((tokens & ((1 << _HALF) - 1)).sum())

    def data_wait_s(self) -> float:
        return float(np.nansum(self.column("time.data_s")))

    def utilisation(self, flops: str, starts: Mapping[Any, Record]) -> Array:
        """FLOP/s of each over the peak of its attempt's devices, of those where both are known."""
        used, attempts = self.column(flops), self.column("attempt")
        known = [None if attempt < 0 else attempt for attempt in np.unique(attempts).tolist()]
        for attempt in known:
            per_token = (starts.get(attempt) or {}).get("flops_per_token")
            if flops == "flops" and per_token is not None:  # as older journals state them
                of = np.isnan(used) & (attempts == (-1 if attempt is None else attempt))
                used[of] = float(per_token) * self.column("tokens")[of]
        took_s = self.duration_s()
        used[took_s <= 0] = np.nan
        np.divide(used, took_s, out=used, where=took_s > 0)
        for attempt in known:
            start = starts.get(attempt) or {}
            peak = start.get("peak_flops") or np.nan
            used[attempts == (-1 if attempt is None else attempt)] /= float(peak) * int(start.get("world", 1))
        return used[~np.isnan(used)]

    def settled(self, starts: Iterable[Mapping[str, Any]]) -> Steps:
        """As `throughput.settled`: all but the first of each attempt; where there are no others, the newest."""
        began = {start.get("attempt"): int(start.get("step", 0)) for start in starts}
        attempts, after = self.column("attempt"), self.column("step")
        after += FIRST  # of an attempt that nobody has started
        for attempt, step in began.items():
            after[attempts == (-1 if attempt is None else attempt)] -= FIRST + step
        found = self.only(after > FIRST)
        return found if len(found) else self.newest(1)


def steps_of(records: Steps | Sequence[Mapping[str, Any]]) -> Steps:
    return (
        records if isinstance(records, Steps) else Steps(Told.of({"t": math.nan, **r, "kind": "step"} for r in records))
    )


def median(values: Array) -> float:
    """As `statistics.median`: of an even number, the mean of the two in the middle."""
    middle = len(values) // 2
    if len(values) % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, [middle - 1, middle])[[middle - 1, middle]].tolist()
    return float((low + high) / 2)


def nearest(values: Array, quantiles: Iterable[float]) -> Iterator[float]:
    """The nearest rank of each: a value that was measured."""
    places = [min(len(values) - 1, int(q * len(values))) for q in quantiles]
    ordered = np.partition(values, places)
    return (float(ordered[place]) for place in places)


def _over(amount: Array, seconds: Array) -> Array:
    out = np.zeros(len(seconds))
    return np.divide(amount, seconds, out=out, where=seconds > 0)
