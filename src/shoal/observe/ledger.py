"""Where the wall time of a run went, from its journal alone.

Each session (`open` … `close`) is a stretch of the time line. It is first covered with a background, one label after
the other, that says what the run was about (starting, recovering, stopping); then what the records say was done from
`begin` to `t` is laid over it. Every microsecond has exactly one label, so the parts sum to the total by construction;
the sums are integers, so they do so exactly. Time when no session was open is told apart and is not in the total.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.track.journal import Record

# In order of precedence, where two overlap: a checkpoint that is written while training goes on costs nothing.
PARTS = {
    "training": "steps that count, data wait excluded",
    "lost": "steps that were done again later, and the step that a failure broke off",
    "data_wait": "waiting for data in steps that count",
    "evaluation": "on held-out data",
    "checkpoint": "saving the state, where training waits for it",
    "recovery": "from a failure to the first step of the next attempt",
    "startup": "from the start of a session to its first step",
    "stopping": "from the last step or the request to stop to the end",
    "other": "between the steps",
}
_RANK = {part: i for i, part in enumerate(PARTS)}
_DOES = {"eval": "evaluation", "checkpoint": "checkpoint", "checkpoint_failed": "checkpoint"}
Span = tuple[int, int, str]  # begin and end in microseconds, label


@dataclass(frozen=True)
class Ledger:
    parts_us: dict[str, int]  # every label of PARTS; they sum to total_us
    total_us: int  # time with a session open
    between_us: int  # time between sessions: nobody was running
    sessions: int

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
    sessions = list(_sessions(records))
    kept = _kept(sessions)
    parts = dict.fromkeys(PARTS, 0)
    total = between = 0
    end_before: int | None = None
    for i, session in enumerate(sessions):
        begin, end = _bounds(session, sessions[i + 1] if i + 1 < len(sessions) else None, now)
        for label, duration in _measure([*_background(session, begin, end), *_foreground(session, kept, begin, end)]):
            parts[label] += duration
        total += end - begin
        between += max(0, begin - end_before) if end_before is not None else 0
        end_before = max(end, end_before or end)
    return Ledger(parts, total, between, len(sessions))


def _sessions(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records of one session after the other; remarks and what the next supervisor found out later tell no time."""
    session: list[Record] = []
    for record in records:
        if record.get("kind") == "warning" or record.get("cause") == "supervisor-lost":
            continue
        if record.get("kind") == "open" and session:
            yield session
            session = []
        session.append(record)
    if session:
        yield session


def _kept(sessions: list[list[Record]]) -> dict[int, int]:
    """For each attempt the last step that no later attempt did again. Attempts count up over the life of a run."""
    limits: dict[int, int] = {}
    for record in (record for session in sessions for record in session):
        attempt = int(record.get("attempt", 0))
        if record["kind"] == "start":
            limits[attempt] = min(limits.get(attempt, 1 << 62), int(record.get("step", 0)))
        elif record["kind"] == "step":  # also without a `start`: a step that is done proves that it is done
            limits[attempt] = min(limits.get(attempt, 1 << 62), int(record["step"]) - 1)
    kept, limit = {}, 1 << 62
    for attempt in sorted(limits, reverse=True):
        kept[attempt] = limit
        limit = min(limit, limits[attempt])
    return kept


def _bounds(session: list[Record], following: list[Record] | None, now: float | None) -> tuple[int, int]:
    """A clock that was set back must not make a session longer than the time until the next one began."""
    begin, end = _us(session[0]["t"]), max(_us(r["t"]) for r in session)
    if following is not None:
        end = min(end, max(begin, _us(following[0]["t"])))
    elif now is not None and not any(r["kind"] == "close" for r in session):
        end = max(end, _us(now))
    return begin, max(begin, end)


def _background(session: list[Record], begin: int, end: int) -> Iterator[Span]:
    """What the run was about, from one record to the next."""
    at, label = begin, "startup"
    last_attempt_work = max((i for i, r in enumerate(session) if "begin" in r), default=-1)
    for i, record in enumerate(session):
        kind, t = record["kind"], min(max(_us(record["t"]), at), end)
        if kind == "failure" and label == "other":
            label = "lost"  # the time since the last thing that was finished: the step that broke off
        began = min(max(_us(record["begin"]), at), t) if "begin" in record else t
        yield at, began, label
        if began < t:  # under the foreground, which is laid over it
            yield began, t, "other"
        at = t
        if kind == "stopping":
            label = "stopping"
        elif kind == "failure":
            label = "recovery" if last_attempt_work > i or _another_attempt(session, i) else "stopping"
        elif "begin" in record and label != "stopping":
            label = "other" if i < last_attempt_work or not _ends(session, i) else "stopping"
    yield at, end, label


def _another_attempt(session: list[Record], i: int) -> bool:
    return any(r["kind"] == "attempt" for r in session[i + 1 :])


def _ends(session: list[Record], i: int) -> bool:
    """Whether after record `i` the session only finishes: it was closed, and no failure came before that."""
    rest = [r["kind"] for r in session[i + 1 :]]
    return "close" in rest and "failure" not in rest


def _foreground(session: list[Record], kept: dict[int, int], begin: int, end: int) -> Iterator[Span]:
    for record in session:
        if "begin" not in record:
            continue
        to = min(max(_us(record["t"]), begin), end)
        since = min(max(_us(record["begin"]), begin), to)
        counts = int(record.get("step", 0)) <= kept.get(int(record.get("attempt", 0)), 1 << 62)
        if record["kind"] == "step" and counts:
            waited = since + max(0, _us(record.get("time", {}).get("data_s", 0.0)))
            yield since, min(waited, to), "data_wait"
            yield min(waited, to), to, "training"
        elif record["kind"] in _DOES:
            label = _DOES[record["kind"]]
            yield since, to, label if counts or label == "checkpoint" else "lost"
        elif record["kind"] == "step":
            yield since, to, "lost"


def _measure(spans: list[Span]) -> Iterator[tuple[str, int]]:
    """Sweeps over the time line: each piece between two edges goes to the label that takes precedence there."""
    labels = list(PARTS)
    edges = sorted(edge for a, b, label in spans if a < b for edge in ((a, 1, _RANK[label]), (b, -1, _RANK[label])))
    active = [0] * len(labels)
    at = edges[0][0] if edges else 0
    for t, change, rank in edges:
        if t > at:
            yield labels[next(i for i, n in enumerate(active) if n)], t - at
            at = t
        active[rank] += change


def _us(seconds: float) -> int:
    return round(float(seconds) * 1e6)
