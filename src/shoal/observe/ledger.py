"""Where the wall time of a run went, from its journal alone.

Each session (`open` … `close`) is a stretch of the time line. It is first covered with a background, one label after
the other, that says what the run was about (starting, recovering, stopping); then what the records say was done from
`begin` to `t` is laid over it. Every microsecond has exactly one label, so the parts sum to the total by construction;
the sums are integers, so they do so exactly. Time when no session was open is told apart and is not in the total.

What a failure has cost is labelled with that failure, too, so the costs of all failures sum to their parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shoal.observe import gaps
from shoal.observe.faults import NOBODY, Cost, Fault, Lives, Owners, faults_of
from shoal.observe.gaps import Span, us
from shoal.track.journal import Record
from shoal.track.tail import REMARKS

# In order of precedence, where two overlap: a checkpoint that is written while training goes on costs nothing.
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
_RANK = {part: i for i, part in enumerate(PARTS)}
_DOES = {"eval": "evaluation", "checkpoint": "checkpoint", "checkpoint_failed": "checkpoint"}


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


def ledger(records: Iterable[Record], now: float | None = None) -> Ledger:
    """`now` is given while the run is alive: the time since its last record belongs to it too."""
    told = list(records)
    faults, lives = faults_of(told), Lives(told)
    owners = lives.owners(faults)
    costs = [Cost(fault) for fault in faults]
    for life, step in lives.lost_steps():
        if (owner := owners(life, step)) != NOBODY:
            costs[owner].lost_steps += 1
    sessions = list(_sessions(told))
    islands = gaps.gaps(told, faults)
    parts = dict.fromkeys(PARTS, 0)
    total = between = 0
    end_before: int | None = None
    for i, session in enumerate(sessions):
        begin, end = _bounds(session, sessions[i + 1] if i + 1 < len(sessions) else None, now, end_before)
        spans = [*_background(session, faults, begin, end)]
        spans += _foreground(session, lives, faults, owners, islands, begin, end)
        for label, owner, duration in _measure(spans):
            parts[label] += duration
            if owner != NOBODY:
                costs[owner].add(label, duration)
        total += end - begin
        away = max(0, begin - end_before) if end_before is not None else 0
        between += away
        for fault in faults:
            if fault.cause == "supervisor-lost" and any(r is fault.record for r in session):
                costs[fault.number].away_us += away
        end_before = max(end, end_before or end)
    return Ledger(parts, total, between, len(sessions), costs)


def _sessions(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records of one session after the other; remarks tell no time, but for the last: when its process left."""
    session: list[Record] = []
    for record in records:
        if record.get("kind") in REMARKS and record.get("kind") != "exit":
            continue
        if record.get("kind") == "open" and session:
            yield session
            session = []
        session.append(record)
    if session:
        yield session


def _bounds(
    session: list[Record], following: list[Record] | None, now: float | None, before: int | None
) -> tuple[int, int]:
    """From when its process was started. A clock that was set back must not make a session longer than the time until
    the next one began, and none begins before the last one's end (`before`)."""
    begin, end = us(session[0]["t"]), max(us(r["t"]) for r in session)
    if session[0].get("began") is not None:
        began = us(session[0]["began"])
        begin = min(begin, began if before is None else max(began, before))
    if following is not None:
        end = min(end, max(begin, us(following[0]["t"])))
    elif now is not None and not any(r["kind"] == "close" for r in session):
        end = max(end, us(now))
    return begin, max(begin, end)


def _background(session: list[Record], faults: list[Fault], begin: int, end: int) -> Iterator[Span]:
    """What the run was about, from one record to the next."""
    by_record = {id(fault.record): fault for fault in faults}
    at, label, owner = begin, "startup", NOBODY
    last_attempt_work = max((i for i, r in enumerate(session) if "begin" in r), default=-1)
    for i, record in enumerate(session):
        kind, t = record["kind"], min(max(us(record["t"]), at), end)
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
        if began < t:  # under the foreground, which is laid over it
            yield began, t, "other", NOBODY
        at = t
        if kind == "stopping":
            label, owner = "stopping", NOBODY
        elif ended:
            goes_on = last_attempt_work > i or any(r["kind"] == "attempt" for r in session[i + 1 :])
            label, owner = ("recovery", owner) if goes_on else ("stopping", NOBODY)
        elif "begin" in record and label != "stopping":
            label = "other" if i < last_attempt_work or not _ends(session, i) else "stopping"
            owner = NOBODY
    yield at, end, label, owner


def _ends(session: list[Record], i: int) -> bool:
    """Whether after record `i` the session only finishes: it was closed, and no failure came before that."""
    rest = [r["kind"] for r in session[i + 1 :] if r.get("island") is None]
    return "close" in rest and "failure" not in rest


def _foreground(
    session: list[Record], lives: Lives, faults: list[Fault], owners: Owners, islands: gaps.Gaps, begin: int, end: int
) -> Iterator[Span]:
    numbers = {id(fault.record): fault.number for fault in faults}
    for record in session:
        if "begin" not in record or not lives.has(record) or lives.told_before(record):
            continue
        to = min(max(us(record["t"]), begin), end)
        since = min(max(us(record["begin"]), begin), to)
        life, step = lives.of(record), int(record.get("step", 0))
        counts = lives.counts(life, step)
        if record["kind"] in _DOES:
            label = _DOES[record["kind"]]
            kept = counts or label == "checkpoint"
            yield since, to, *((label, NOBODY) if kept else ("lost", owners(life, step)))
        elif record["kind"] in ("skip", "rewind"):  # a step that was not taken; the way back to an earlier one
            yield since, to, "lost" if record["kind"] == "skip" else "recovery", numbers[id(record)]
        elif record["kind"] == "step" and not counts:
            yield since, to, "lost", owners(life, step)
        elif record["kind"] == "step":
            waited = min(to, since + max(0, us(record.get("time", {}).get("data_s", 0.0))))
            yield since, waited, "data_wait", NOBODY
            for a, b, label, owner in islands.get(id(record), ()):  # what an island's fault has cost the others
                a, b = min(max(a, begin), to), min(max(b, begin), to)
                yield a, b, label, owner
                yield waited, a, "training", NOBODY
                waited = max(waited, b)
            yield waited, to, "training", NOBODY


def _measure(spans: list[Span]) -> Iterator[tuple[str, int, int]]:
    """Sweeps over the time line: each piece between two edges goes to the label that takes precedence there."""
    labels = list(PARTS)
    edges = sorted(
        edge
        for a, b, label, owner in spans
        if a < b
        for edge in ((a, 1, _RANK[label], owner), (b, -1, _RANK[label], owner))
    )
    active: dict[tuple[int, int], int] = {}
    at = edges[0][0] if edges else 0
    for t, change, rank, owner in edges:
        if t > at:
            first = min(active)
            yield labels[first[0]], first[1], t - at
            at = t
        active[rank, owner] = active.get((rank, owner), 0) + change
        if not active[rank, owner]:
            del active[rank, owner]
