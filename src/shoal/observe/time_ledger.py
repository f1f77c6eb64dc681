"""Where the wall time of a run went, from its journal alone.

Each session (`open` … `close`) is a stretch of the time line. It is first covered with a background, one label after
the other, that says what the run was about (starting, recovering, stopping); then what the records say was done from
`begin` to `t` is laid over it. Every microsecond has exactly one label, so the parts sum to the total by construction;
the sums are integers, so they do so exactly. Time when no session was open is told apart and is not in the total.

What a failure has cost is labelled with that failure, too, so the costs of all failures sum to their parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from shoal.journal.journal import Record
from shoal.journal.reading import Told, told_of
from shoal.journal.tail import REMARKS
from shoal.observe import gaps, timeline
from shoal.observe.faults import NOBODY, Cost, Fault, faults_of
from shoal.observe.gaps import Span, us
from shoal.observe.lives import Lives, Others, Owners
from shoal.observe.timeline import Session

# In order of precedence (`timeline.PRECEDENCE`), where two overlap: a checkpoint that is written while training goes on
# costs nothing.
PARTS = {
    "training": "steps that count, data wait excluded",
    "lost": "steps that were done again later, and the step that a failure broke off",
    "data_wait": "waiting for data in steps that count",
    "evaluation": "on held-out data",
    "detection": "from when a fault happened, or the last sign of life, until it was noticed",
    "recovery": "from when a fault was noticed to the next step",
    "checkpoint": "saving the state, where training waits for it",
    "startup": "from the start of a session, of its process, to its first step",
    "stopping": "from the last step or the request to stop to the end of the process",
    "other": "between the steps",
}
_DOES = {
    "eval": "evaluation",
    "tasks": "evaluation",
    "samples": "evaluation",
    "checkpoint": "checkpoint",
    "checkpoint_failed": "checkpoint",
}
# Kinds of which more is asked than when, in which attempt and at which step.
NEEDED = frozenset(
    (
        "open",
        "attempt",
        "start",
        "failure",
        "skip",
        "rewind",
        "epoch",
        "island",
        "hang",
        "straggler",
        "stopping",
        "close",
    )
)


@dataclass(frozen=True)
class Ledger:
    parts_us: dict[str, int]  # every label of PARTS; they sum to total_us
    total_us: int  # time with a session open
    between_us: int  # time between sessions: nobody was running
    sessions: int
    costs: list[Cost] = field(default_factory=list)  # of each fault, in their order

    def seconds(self, part: str) -> float:
        return self.parts_us[part] / 1e6

    @property
    def total_s(self) -> float:
        return self.total_us / 1e6

    @property
    def goodput(self) -> float:
        """The share of the time that trained the model."""
        return self.parts_us["training"] / self.total_us if self.total_us else 0.0


def ledger(records: Told | Iterable[Record], now: float | None = None) -> Ledger:
    """`now` is given while the run is alive: the time since its last record belongs to it too."""
    told = told_of(records)
    others = told.others(NEEDED)
    faults, lives = faults_of(record for _, record in others), Lives(told, others)
    owners = lives.owners(faults)
    costs = [Cost(fault) for fault in faults]
    for life, steps in lives.lost_steps():
        for owner, count in zip(*np.unique(owners.many(life, steps), return_counts=True), strict=True):
            if owner != NOBODY:
                costs[owner].lost_steps += int(count)
    sessions = list(_sessions(told, others))
    islands = gaps.gaps(told, others, faults)
    parts = dict.fromkeys(PARTS, 0)
    total = between = 0
    end_before: int | None = None
    for i, session in enumerate(sessions):
        begin, end = session.bounds(sessions[i + 1] if i + 1 < len(sessions) else None, now, end_before)
        spans = [*_background(session, faults, begin, end)]
        spans += _done(session, lives, faults, owners, begin, end)
        labelled = 0
        for label, owner, duration in timeline.measure(session, lives, owners, islands, spans, begin, end):
            parts[label] += duration
            labelled += duration
            if owner != NOBODY:
                costs[owner].add(label, duration)
        parts["other"] += end - begin - labelled  # it lies below all else, and is nobody's
        total += end - begin
        away = max(0, begin - end_before) if end_before is not None else 0
        between += away
        for fault in faults:
            if fault.cause == "supervisor-lost" and any(r is fault.record for _, r in session.others):
                costs[fault.number].away_us += away
        end_before = max(end, end_before or end)
    return Ledger(parts, total, between, len(sessions), costs)


def _sessions(told: Told, others: Others) -> Iterator[Session]:
    """One session after the other; remarks tell no time, but for the last: when its process left."""
    timed = [(place, record) for place, record in others if record["kind"] not in REMARKS or record["kind"] == "exit"]
    opens = [i for i, (_, record) in enumerate(timed) if record["kind"] == "open"]
    edges = [(0, 0)] + [(i, timed[i][0]) for i in opens] + [(len(timed), told.rows)]
    for (first, begin), (last, end) in itertools.pairwise(edges):
        if last > first or end > begin:
            yield Session(told, timed[first:last], begin, end)


def _background(session: Session, faults: list[Fault], begin: int, end: int) -> Iterator[Span]:
    """What the run was about, from one record to the next; `other` is left out."""
    for a, b, label, owner in _about(session, faults, begin, end):
        if a < b and label != "other":
            yield a, b, label, owner


def _about(session: Session, faults: list[Fault], begin: int, end: int) -> Iterator[Span]:
    by_record = {id(fault.record): fault for fault in faults}
    at, label, owner = begin, "startup", NOBODY
    kinds = [record["kind"] for _, record in session.others]
    last_attempt = max((i for i, kind in enumerate(kinds) if kind == "attempt"), default=-1)
    last_work = session.last_work()
    for i, first, last in session.turns():
        if first < last:  # steps, then the record
            if label != "other":
                yield from session.about(first, last, at, end, label, owner)
            before, at = at, session.reached(first, last, at, end)
            worked = session.last_begun(first, last)
            if worked is not None and label != "stopping":
                ends = last_work == (-1, worked) and _ends(session, i)
                if ends:  # then come steps that do not say when they began
                    yield session.reached(first, worked + 1, before, end), at, "stopping", NOBODY
                label, owner = "stopping" if ends else "other", NOBODY
        if i == len(kinds):
            break
        record, kind = session.others[i][1], kinds[i]
        t = min(max(us(record["t"]), at), end)
        ended = kind == "failure" and record.get("island") is None  # an island's end does not end the others
        if ended:
            fault = by_record[id(record)]
            # That a supervisor is gone was noticed by whoever started this one: what it does is the recovery.
            happened, noticed = (at, at) if fault.cause == "supervisor-lost" else fault.within(at, t)
            # Since the last thing that was finished: the step that broke off.
            yield at, happened, *(("lost", fault.number) if label == "other" else (label, owner))
            yield happened, noticed, "detection", fault.number
            at, label, owner = noticed, "recovery", fault.number
        began = min(max(us(record["begin"]), at), t) if "begin" in record else t
        yield at, began, label, owner
        at = t
        if kind == "stopping":
            label, owner = "stopping", NOBODY
        elif ended:
            goes_on = last_work[0] > i or last_work[1] >= session.others[i][0] or last_attempt > i
            label, owner = ("recovery", owner) if goes_on else ("stopping", NOBODY)
        elif "begin" in record and label != "stopping":
            label = "stopping" if last_work == (i, -1) and _ends(session, i + 1) else "other"
            owner = NOBODY
    yield at, end, label, owner


def _ends(session: Session, i: int) -> bool:
    """Whether from the other record `i` on the session only finishes: it was closed, and no failure came before."""
    rest = [record["kind"] for _, record in session.others[i:] if record.get("island") is None]
    return "close" in rest and "failure" not in rest


def _done(session: Session, lives: Lives, faults: list[Fault], owners: Owners, begin: int, end: int) -> Iterator[Span]:
    """What other records than steps say was done from `begin` to `t`."""
    numbers = {id(fault.record): fault.number for fault in faults}
    for _, record in session.others:
        if "begin" not in record or not lives.has(record):
            continue
        to = min(max(us(record["t"]), begin), end)
        since = min(max(us(record["begin"]), begin), to)
        life, step = lives.of(record), int(record.get("step", 0))
        if record["kind"] in _DOES:
            label = _DOES[record["kind"]]
            kept = step <= lives.kept(life) or label == "checkpoint"
            yield since, to, *((label, NOBODY) if kept else ("lost", owners(life, step)))
        elif record["kind"] in ("skip", "rewind"):  # a step that was not taken; the way back to an earlier one
            yield since, to, "lost" if record["kind"] == "skip" else "recovery", numbers[id(record)]
