"""The ledger and the history record by record, as `shoal.observe` had them before it reckoned by column: slow, in need
of the whole journal in memory, and plain. Tests hold the fast ones to their numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from shoal.journal.journal import Record
from shoal.journal.tail import REMARKS
from shoal.observe.faults import NOBODY, Cost, Fault, faults_of
from shoal.observe.gaps import Span, us
from shoal.observe.history import Break
from shoal.observe.time_ledger import PARTS, Ledger

Life = tuple[int, int]
Owners = Callable[[Life, int], int]
Gaps = dict[int, list[Span]]
_NEVER = 1 << 62
_RANK = {part: i for i, part in enumerate(PARTS)}
_DOES = {"eval": "evaluation", "checkpoint": "checkpoint", "checkpoint_failed": "checkpoint"}


@dataclass
class History:
    steps: list[Record] = field(default_factory=list)  # in order; a step that was done twice counts as it was done last
    lost: list[Record] = field(default_factory=list)  # the other times
    epochs: list[Record] = field(default_factory=list)  # of islands: who took part, from when on
    evals: list[Record] = field(default_factory=list)
    routers: list[Record] = field(default_factory=list)
    traffic: list[Record] = field(default_factory=list)  # of counted steps
    checkpoints: list[Record] = field(default_factory=list)
    last_saves: list[Record] = field(default_factory=list)  # those after which a session took no further step
    checkpoints_failed: int = 0
    starts: list[Record] = field(default_factory=list)
    failures: list[Record] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    stragglers: list[Record] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    sessions: int = 0
    digest: str | None = None  # of the final parameters

    @property
    def start(self) -> Record:
        """The newest attempt's."""
        return self.starts[-1] if self.starts else {}


def history(records: Iterable[Record]) -> History:
    found = History()
    told = list(records)
    lives = Lives(told)
    steps: dict[int, Record] = {}
    evals: dict[int, Record] = {}
    routers: dict[int, Record] = {}
    last_save: Record | None = None
    for record in told:
        match record.get("kind"):
            case "step" if not lives.told_before(record):
                last_save = None if last_save and int(record["step"]) > int(last_save["step"]) else last_save
                if (before := steps.pop(int(record["step"]), None)) is not None:
                    found.lost.append(before)
                steps[int(record["step"])] = record
            case "eval":
                evals[int(record["step"])] = record
            case "router":
                routers[int(record["step"])] = record
            case "traffic":
                found.traffic.append(record)
            case "start":
                if found.starts:
                    failed = any(f.get("attempt") == found.starts[-1].get("attempt") for f in found.failures)
                    found.breaks.append(Break(max(steps, default=0), int(record.get("step", 0)), failed))
                found.starts.append(record)
            case "rewind":
                to = int(record.get("to", 0))
                found.breaks.append(Break(max(steps, default=0), to, failed=True))
                found.lost += [steps.pop(step) for step in sorted(steps) if step > to]
            case "checkpoint":
                found.checkpoints.append(record)
                last_save = record
            case "close":
                found.last_saves += [last_save] if last_save else []
                last_save = None
            case "checkpoint_failed":
                found.checkpoints_failed += 1
            case "failure":
                found.failures.append(record)
            case "straggler":
                found.stragglers.append(record)
            case "warning":
                found.warnings.append(str(record.get("text")))
            case "epoch":
                found.epochs.append(record)
            case "open":
                found.sessions += 1
            case "finished":
                found.digest = record.get("digest")
    found.steps = [steps[step] for step in sorted(steps)]
    found.evals = [evals[step] for step in sorted(evals)]
    found.routers = [routers[step] for step in sorted(routers)]
    return found


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
    islands = gaps(told, faults)
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
    session: list[Record], lives: Lives, faults: list[Fault], owners: Owners, islands: Gaps, begin: int, end: int
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


class Lives:
    """Which steps count, and which were undone."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._of: dict[int, Life] = {}
        self._again: set[int] = set()
        self._limits: dict[Life, int] = {}  # the life went on from this step, or one before it
        self._begins: dict[Life, int] = {}  # number of its first record
        self._steps: dict[Life, set[int]] = {}
        self._order: dict[int, int] = {}
        rewinds: dict[int, int] = {}
        for i, record in enumerate(records):
            self._order[id(record)] = i
            kind = record.get("kind")
            if kind not in ("start", "step", "eval", "checkpoint", "checkpoint_failed", "skip", "rewind"):
                continue
            attempt = int(record.get("attempt", 0))
            if kind == "rewind":
                rewinds[attempt] = rewinds.get(attempt, 0) + 1
            life = self._of[id(record)] = (attempt, rewinds.get(attempt, 0))
            self._begins.setdefault(life, i)
            if kind in ("start", "rewind"):
                self._limit(life, int(record.get("to" if kind == "rewind" else "step", 0) or 0))
            elif kind == "step":  # also without a `start`: a step that is done proves that it is done
                step, taken = int(record["step"]), self._steps.setdefault(life, set())
                if step in taken and "epoch" in record:
                    self._again.add(id(record))  # by a first member that had been stopped; the first one counts
                    continue
                taken.add(step)
                self._limit(life, step - 1)
        self._kept: dict[Life, int] = {}
        limit = _NEVER
        for life in sorted(self._limits, reverse=True):
            self._kept[life] = limit
            limit = min(limit, self._limits[life])

    def has(self, record: Record) -> bool:
        """Whether it is one that belongs to a life; others are remarks, or of a newer Shoal."""
        return id(record) in self._of

    def of(self, record: Record) -> Life:
        return self._of[id(record)]

    def counts(self, life: Life, step: int) -> bool:
        """Whether no later life did that step again."""
        return step <= self._kept.get(life, _NEVER)

    def told_before(self, record: Record) -> bool:
        return id(record) in self._again

    def lost_steps(self) -> Iterator[tuple[Life, int]]:
        """Steps that were done again."""
        for life, steps in self._steps.items():
            for step in steps:
                if not self.counts(life, step):
                    yield life, step

    def owners(self, faults: list[Fault]) -> Owners:
        """Says which fault undid a step of a life: the last one before the life that went on from an earlier step."""
        lives, before, since = sorted(self._limits), dict.fromkeys(self._limits, NOBODY), 0
        places = [self._order[id(fault.record)] for fault in faults]
        for life in lives:  # a life that began without a fault before it: somebody had stopped the run
            place = self._begins[life]
            here = [n for n in range(len(faults)) if since <= places[n] < place + (life[1] > 0)]  # a rewind is its own
            before[life], since = here[-1] if here else NOBODY, place

        def owner(life: Life, step: int) -> int:
            return next((before[b] for b in lives if b > life and self._limits[b] < step), NOBODY)

        return owner

    def _limit(self, life: Life, step: int) -> None:
        self._limits[life] = min(self._limits.get(life, _NEVER), step)


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
