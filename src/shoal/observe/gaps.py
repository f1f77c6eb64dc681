"""What the loss of an island costs the others: the time by which the next step is later than usual.

The first step of an epoch carries the gap: from the end of the last work to its own end, less what a step with as many
islands usually takes. Up to when the loss was noticed that is detection, after it recovery. Where one comes (back),
what its joining costs the others is told as recovery, too.
"""

from __future__ import annotations

import bisect

import numpy as np

from shoal.journal.columns import Array
from shoal.journal.journal import Record
from shoal.journal.reading import Told
from shoal.observe.faults import NOBODY, Fault
from shoal.observe.lives import Others
from shoal.observe.steps import median

Span = tuple[int, int, str, int]  # begin and end in microseconds, label, number of the fault that has cost it
Gaps = dict[int, list[Span]]  # row of a `step` → what lies before its end

_MOST_US = 4e18  # fits into 64 bits, and is longer than anything
_EVALUATED = ("eval", "tasks", "samples")


def us(seconds: float) -> int:
    return round(float(seconds) * 1e6)


def all_us(seconds: Array) -> Array:
    """As `us`, to the microsecond."""
    return np.rint(np.clip(seconds * 1e6, -_MOST_US, _MOST_US)).astype(np.int64)


def gaps(told: Told, others: Others, faults: list[Fault]) -> Gaps:
    if not told.has("epoch"):
        return {}
    rows = np.flatnonzero((told.column("epoch") >= 0) & ~np.isnan(told.column("begin")))
    if not rows.size:
        return {}
    epochs, ends, begins = told.column("epoch")[rows], all_us(told.column("t")[rows]), told.column("begin")[rows]
    islands = told.island_counts()[rows]
    usual = _usual(epochs, ends, begins, islands)
    told_epochs = {record.get("number"): record for _, record in others if record.get("kind") == "epoch"}
    opens = [place for place, record in others if record.get("kind") == "open"]
    evals = [(place, us(record["t"])) for place, record in others if record.get("kind") in _EVALUATED]
    found: Gaps = {}
    for i in (np.flatnonzero(np.diff(epochs)) + 1).tolist():
        before, row = int(rows[i - 1]), int(rows[i])
        if bisect.bisect_right(opens, row) > bisect.bisect_right(opens, before):
            continue  # its first step is the start of the session
        evaluated = evals[bisect.bisect_right(evals, (before, 1 << 63)) : bisect.bisect_right(evals, (row, 1 << 63))]
        worked = evaluated[-1][1] if evaluated else int(ends[i - 1])
        to, usually = int(ends[i]), usual.get(int(islands[i]), usual[0])
        late = max(0, to - worked - usually)
        # A step that had begun before the fault ends late; one that began after it begins late.
        begin = to - late if us(begins[i]) <= to - late else max(worked, to - usually - late)
        t = float(told.column("t", row, row + 1)[0])
        cause = _cause(int(epochs[i - 1]), int(epochs[i]), t, faults, told_epochs)
        found[row] = _split(begin, begin + late, worked, cause)
    return found


def _usual(epochs: Array, ends: Array, begins: Array, islands: Array) -> dict[int, int]:
    """By number of islands, from one end to the next; 0: whatever the number."""
    same = np.diff(epochs) == 0
    took, of = np.diff(ends)[same], islands[1:][same]
    whatever = np.concatenate((took, took[of == 0])) if took.size else np.maximum(0, ends - all_us(begins))
    by_number = {int(n): took[of == n] for n in np.unique(of) if n}
    return {n: max(0, round(median(durations))) for n, durations in {0: whatever, **by_number}.items()}


def _cause(before: int, epoch: int, t: float, faults: list[Fault], epochs: dict[int | None, Record]) -> Fault | None:
    """The newest fault between two epochs; for a newcomer, the one that it comes back from."""
    between = [f for f in faults if f.epoch is not None and before < f.epoch <= epoch]
    if between:
        return between[-1]
    joined = (epochs.get(epoch) or {}).get("joined") or ()
    back = [f for f in faults if f.island in joined and float(f.record["t"]) <= t]
    return back[-1] if back else None


def _split(begin: int, end: int, worked: int, fault: Fault | None) -> list[Span]:
    if fault is None:
        return [(begin, end, "recovery", NOBODY)]
    noticed = end if fault.noticed is None else us(fault.noticed)
    happened = worked if fault.happened is None else max(worked, us(fault.happened))
    seen = begin + min(end - begin, max(0, noticed - happened))
    return [(begin, seen, "detection", fault.number), (seen, end, "recovery", fault.number)]
