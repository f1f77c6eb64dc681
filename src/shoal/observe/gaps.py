"""What the loss of an island costs the others: the time by which the next step is later than usual.

The first step of an epoch carries the gap: from the end of the last work to its own end, less what a step with as many
islands usually takes. Up to when the loss was noticed that is detection, after it recovery. Where one comes (back),
what its joining costs the others is told as recovery, too.
"""

from __future__ import annotations

import itertools
import statistics

from shoal.observe.faults import NOBODY, Fault
from shoal.track.journal import Record

Span = tuple[int, int, str, int]  # begin and end in microseconds, label, number of the fault that has cost it
Gaps = dict[int, list[Span]]  # id of a `step` record → what lies before its end


def us(seconds: float) -> int:
    return round(float(seconds) * 1e6)


def gaps(records: list[Record], faults: list[Fault]) -> Gaps:
    steps = [r for r in records if r.get("kind") == "step" and "epoch" in r and "begin" in r]
    if not steps:
        return {}
    usual, epochs = _usual(steps), {r.get("number"): r for r in records if r.get("kind") == "epoch"}
    found: Gaps = {}
    worked: int | None = None
    before: Record | None = None
    for record in records:
        if record.get("kind") == "open":
            worked, before = None, None  # its first step is the start of the session
        if record.get("kind") == "eval":
            worked = us(record["t"])
        if record.get("kind") != "step" or "epoch" not in record or "begin" not in record:
            continue
        if before is not None and worked is not None and record["epoch"] != before["epoch"]:
            to, usually = us(record["t"]), usual.get(_islands(record), usual[0])
            late = max(0, to - worked - usually)
            # A step that had begun before the fault ends late; one that began after it begins late.
            begin = to - late if us(record["begin"]) <= to - late else max(worked, to - usually - late)
            found[id(record)] = _split(begin, begin + late, worked, _cause(before, record, faults, epochs))
        worked, before = us(record["t"]), record
    return found


def _usual(steps: list[Record]) -> dict[int, int]:
    """By number of islands, from one end to the next; 0: whatever the number."""
    took: dict[int, list[int]] = {0: [0]}
    for before, step in itertools.pairwise(steps):
        if before["epoch"] == step["epoch"]:
            for n in (0, _islands(step)):
                took.setdefault(n, []).append(us(step["t"]) - us(before["t"]))
    took[0] = took[0][1:] or [max(0, us(s["t"]) - us(s["begin"])) for s in steps]
    return {n: max(0, round(statistics.median(durations))) for n, durations in took.items()}


def _islands(step: Record) -> int:
    return len(step.get("islands") or ())


def _cause(before: Record, step: Record, faults: list[Fault], epochs: dict[int | None, Record]) -> Fault | None:
    """The newest fault between the two steps; for a newcomer, the one that it comes back from."""
    between = [f for f in faults if f.epoch is not None and before["epoch"] < f.epoch <= step["epoch"]]
    if between:
        return between[-1]
    joined = (epochs.get(step["epoch"]) or {}).get("joined") or ()
    back = [f for f in faults if f.island in joined and float(f.record["t"]) <= float(step["t"])]
    return back[-1] if back else None


def _split(begin: int, end: int, worked: int, fault: Fault | None) -> list[Span]:
    if fault is None:
        return [(begin, end, "recovery", NOBODY)]
    noticed = end if fault.noticed is None else us(fault.noticed)
    happened = worked if fault.happened is None else max(worked, us(fault.happened))
    seen = begin + min(end - begin, max(0, noticed - happened))
    return [(begin, seen, "detection", fault.number), (seen, end, "recovery", fault.number)]
