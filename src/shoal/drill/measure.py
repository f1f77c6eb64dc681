"""What each fault has cost, from the journal of the run that was broken and of the one that was not."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.data.skips import Skips
from shoal.drill.means import Broken
from shoal.journal.journal import Record
from shoal.journal.reading import Told
from shoal.observe.history import history
from shoal.observe.lives import Life, Lives

# By what the run tells that it has noticed a fault of that kind.
_TELLS = {
    "kill": ("failure", "epoch", "hang"),
    "stop": ("failure", "epoch", "hang", "straggler"),
    "slow": ("straggler", "hang", "failure", "epoch"),
    "oom": ("failure", "epoch"),
    "nan": ("skip", "rewind", "failure"),
    "bitflip": ("warning",),
    "disk-full": ("checkpoint_failed", "warning"),
    "partition": ("epoch", "failure"),
    "coordinator": ("epoch", "failure"),
    "preempt": ("stopping", "leaving", "epoch"),
}
_DAMAGED = ("passed over", "damaged")  # in the warning about a checkpoint
_AGAIN = "is tried again"  # … about a save


@dataclass(frozen=True)
class Measured:
    kind: str
    victim: str
    step: int
    t: float
    detection_s: float | None  # None: nobody noticed
    stall_s: float | None  # None: no step came after it
    lost_steps: int
    lost_samples: int
    repeated_samples: int
    resumed: bool
    note: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Samples:
    """(step, how many) each."""

    lost: list[tuple[int, int]]
    repeated: list[tuple[int, int]]
    left_out: int  # on purpose: the journal says so (`skip`, `rewind`)


def measure(
    faults: Sequence[Broken], records: Sequence[Record], calm: Sequence[Record], pace_s: float = 0.0
) -> list[Measured]:
    """`pace_s`: by how much longer than in the calm run each step was made to take."""
    read = samples(records, calm)
    usual_s = _usual_s(calm) + pace_s
    found = []
    for i, fault in enumerate(faults):
        end = faults[i + 1].t if i + 1 < len(faults) else float("inf")
        seen = noticed(fault, records, end)
        lost, repeated = (
            sum(n for step, n in which if _owner(faults, step) == i) for which in (read.lost, read.repeated)
        )
        found.append(
            Measured(
                fault.kind,
                fault.victim,
                fault.step,
                fault.t,
                None if seen is None else max(0.0, seen - fault.t),
                _stall_s(fault, records, usual_s, seen, end),
                _lost_steps(fault, records, end),
                lost,
                repeated,
                fault.resumed,
                fault.note,
            )
        )
    return found


def noticed(fault: Broken, records: Iterable[Record], before: float) -> float | None:
    times = [fault.seen] if fault.seen is not None else []
    for record in records:
        t = float(record["t"])
        if record["kind"] in _TELLS[fault.kind] and fault.t <= t < before and _is_about(fault, record):
            hung = record["kind"] == "failure" and record.get("cause") == "hang"
            said = record.get("noticed") or (None if hung else record.get("at")) or t
            times.append(max(fault.t, float(said)))
    return min(times, default=None)


def _is_about(fault: Broken, record: Record) -> bool:
    text = str(record.get("text") or "")
    if fault.kind == "coordinator" and fault.island is None:  # islands go on, and need not notice
        return record.get("cause") == "supervisor-lost"
    if record["kind"] == "warning":
        return _AGAIN in text if fault.kind == "disk-full" else any(word in text for word in _DAMAGED)
    if record["kind"] == "epoch":
        if fault.kind == "partition":  # either side may be the one that goes on
            return bool(record.get("left"))
        return fault.island is None or str(fault.island) in (record.get("left") or {})
    return fault.island is None or record.get("island") in (None, fault.island)


def _ends(records: Iterable[Record]) -> list[float]:
    """When steps ended, each once."""
    return [float(record["t"]) for record, _ in _taken(records)]


def _taken(records: Iterable[Record]) -> list[tuple[Record, Life]]:
    """The steps, each once a life."""
    told = list(records)
    known = Told.of(told)
    lives = Lives(known, known.others())
    steps = [record for record in told if record["kind"] == "step"]
    of = [life for begin, end, life in lives.pieces for _ in range(begin, end)]
    again = lives.is_again(0, len(steps))
    return [(record, life) for record, life, twice in zip(steps, of, again, strict=True) if not twice]


def _counted(records: Iterable[Record]) -> list[Record]:
    """The steps that count, in order."""
    told = list(records)
    steps = [record for record in told if record["kind"] == "step"]
    return [steps[row] for row in history(told).steps.rows.tolist()]


def _usual_s(records: Sequence[Record]) -> float:
    apart = [b - a for a, b in itertools.pairwise(_ends(records))]
    return statistics.median(apart) if apart else 0.0


def _stall_s(
    fault: Broken, records: Sequence[Record], usual_s: float, seen: float | None, before: float
) -> float | None:
    """By how much longer than usual the others waited for their next step; all of it, for one that was slow."""
    ends = _ends(records)
    until = max(fault.until, seen or 0.0) + 2 * usual_s
    late = [
        b - a - usual_s - _evaluating(records, a, b)
        for a, b in itertools.pairwise(ends)
        if b > fault.t and a < min(until, before)
    ]
    if not late:
        return None
    return sum(x for x in late if x > 0) if fault.kind == "slow" else max(0.0, *late)


def _evaluating(records: Iterable[Record], begin: float, end: float) -> float:
    evals = [r for r in records if r["kind"] == "eval"]
    return sum(max(0.0, min(end, float(r["t"])) - max(begin, float(r["begin"]))) for r in evals)


def _lost_steps(fault: Broken, records: Sequence[Record], before: float) -> int:
    """Steps that were done before it and had to be done again: those after the one that the run went on from. They may
    be done again as late as after the next fault, which is not to blame for them."""
    counts: set[int] = set()  # steps done so far that nobody has undone
    last, lost = None, 0
    for record, life in _taken(records):
        step = int(record["step"])
        if life != last:
            undone = {done for done in counts if done >= step}
            counts -= undone
            lost += len(undone) * (fault.t <= float(record["t"]) < before)
        counts.add(step)
        last = life
    return lost


def samples(records: Iterable[Record], calm: Iterable[Record]) -> Samples:
    """Which samples the steps that count have read, against those of the run that nobody broke."""
    told = list(records)
    if all("position" not in r for r in told if r["kind"] == "step"):
        return Samples([], [], 0)  # of a script nobody knows what it reads
    expected = [(int(r["position"]), int(r["samples"]), int(r["step"])) for r in _counted(calm)]
    if not expected:
        return Samples([], [], 0)
    batch = expected[0][1]
    skips = Skips()
    for record in told:
        if record["kind"] == "skip":
            skips.add(int(record["batch"]))
        elif record["kind"] == "rewind":
            skips.add(*(int(b) for b in record["batches"]))
    steps = _counted(told)
    used = [(int(r["position"]), int(r["position"]) + int(r["samples"]), int(r["step"])) for r in steps]
    out = [(first * batch, (last + 1) * batch, 0) for first, last in skips.spans]
    end = max(position + n for position, n, _ in expected)
    lost, repeated, at = [], [], expected[0][0]
    for a, b, step in sorted([*used, *out]):
        if a > at:
            lost += _steps_of(expected, at, min(a, end))
        if a < at and step:
            repeated.append((step, min(b, at) - a))
        at = max(at, b)
    lost += _steps_of(expected, at, end)
    return Samples(lost, repeated, len(skips) * batch)


def _steps_of(expected: list[tuple[int, int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The samples from `begin` to `end`, by the step that should have read them."""
    found = []
    first = max(0, bisect.bisect_right(expected, (begin, 1 << 62, 0)) - 1)
    for position, n, step in expected[first:]:
        if position >= end:
            break
        if (overlap := min(end, position + n) - max(begin, position)) > 0:
            found.append((step, overlap))
    return found


def _owner(faults: Sequence[Broken], step: int) -> int:
    """The last fault at or before that step; the first one for what comes before all of them."""
    return max([i for i, fault in enumerate(faults) if fault.step <= step], default=0)
