"""A journal sorted into what a report needs: the steps that count, those that were lost, and what happened between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shoal.journal.columns import Array
from shoal.journal.journal import Record
from shoal.journal.reading import Told, told_of
from shoal.observe.lives import Lives
from shoal.observe.phases import on_device
from shoal.observe.steps import Steps, median, nearest

# Kinds of which a report says more than when they were; of `router` it wants the newest alone.
NEEDED = frozenset(
    (
        *("open", "start", "close", "finished", "epoch", "failure", "rewind", "straggler", "warning"),
        *("eval", "tasks", "evaluated", "samples", "traffic", "checkpoint"),
    )
)


@dataclass(frozen=True)
class Break:
    """Where one attempt ended and the next took over."""

    reached: int  # the furthest step before it
    resumed_at: int  # steps that were kept
    failed: bool  # a failure, or somebody stopped and resumed the run


@dataclass
class History:
    steps: Steps  # in order; a step that was done twice counts as it was done last
    lost: Steps  # the other times
    epochs: list[Record] = field(default_factory=list)  # of islands: who took part, from when on
    evals: list[Record] = field(default_factory=list)
    tasks: list[Record] = field(default_factory=list)  # the trainer's, and those of `shoal eval`
    samples: list[Record] = field(default_factory=list)  # by step
    router: Record | None = None  # the newest
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

    @property
    def script(self) -> str | None:
        """Whose steps these are, if not Shoal's."""
        said = self.start.get("script")
        return said if isinstance(said, str) else None


def history(records: Told | Iterable[Record]) -> History:
    told = told_of(records)
    others = told.others(NEEDED)
    again = Lives(told, others).again
    rewinds = [(place, int(record.get("to", 0))) for place, record in others if record["kind"] == "rewind"]
    counted, lost = _counted(told, again, rewinds)
    found = History(counted, lost, router=told.newest("router"))
    reached = _Reached(told, again)
    evals: dict[int, Record] = {}
    samples: dict[int, Record] = {}
    last_save: tuple[int, Record] | None = None
    for place, record in others:
        match record["kind"]:
            case "eval":
                evals[int(record["step"])] = record
            case "tasks" | "evaluated":
                found.tasks.append(record)
            case "samples":
                samples[int(record["step"])] = record
            case "traffic":
                found.traffic.append(record)
            case "start":
                if found.starts:
                    failed = any(f.get("attempt") == found.starts[-1].get("attempt") for f in found.failures)
                    found.breaks.append(Break(reached.by(place), int(record.get("step", 0)), failed))
                found.starts.append(record)
            case "rewind":
                to = int(record.get("to", 0))
                found.breaks.append(Break(reached.by(place), to, failed=True))
                reached.undo(place, to)
            case "checkpoint":
                found.checkpoints.append(record)
                last_save = (place, record)
            case "close":
                if last_save and reached.between(last_save[0], place) <= int(last_save[1]["step"]):
                    found.last_saves.append(last_save[1])
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
    found.evals = [evals[step] for step in sorted(evals)]
    found.samples = [samples[step] for step in sorted(samples)]
    return found


def _counted(told: Told, again: Array, rewinds: list[tuple[int, int]]) -> tuple[Steps, Steps]:
    """The steps that count, by number, and the others."""
    steps = told.column("step")
    if not again.size and not rewinds and (np.diff(steps) > 0).all():
        return Steps(told), Steps(told, np.empty(0, np.int64))
    seen = np.ones(len(steps), bool)
    seen[again] = False
    rows = np.flatnonzero(seen).astype(np.int32 if len(steps) < 1 << 31 else np.int64)
    del seen
    rows = rows[np.argsort(steps[rows], kind="stable")]
    last = np.append(np.diff(steps[rows]) != 0, True)[: len(rows)]  # of each number the one that was done last
    counts = last & _stands(steps, rewinds)[rows]
    return Steps(told, rows[counts]), Steps(told, np.sort(rows[~counts]))


def _stands(steps: Array, rewinds: list[tuple[int, int]]) -> Array:
    """Which rows no later rewind has undone."""
    stands = np.ones(len(steps), bool)
    for place, to in rewinds:
        stands[:place] &= steps[:place] <= to
    return stands


class _Reached:
    """The furthest step so far that counts, for one who goes through the journal."""

    def __init__(self, told: Told, again: Array) -> None:
        self._told, self._again = told, again
        self._at, self._furthest = 0, 0
        self._undone: list[tuple[int, int]] = []

    def by(self, row: int) -> int:
        self._furthest = max(self._furthest, self.between(self._at, row))
        self._at = row
        return self._furthest

    def undo(self, row: int, to: int) -> None:
        """A rewind."""
        self._undone.append((row, to))
        steps = self._told.column("step", 0, row)
        stands = _stands(steps, self._undone)
        stands[self._again[self._again < row]] = False
        self._at, self._furthest = row, int(steps[stands].max(initial=0))

    def between(self, first: int, last: int) -> int:
        steps = self._told.column("step", first, last)
        a, b = np.searchsorted(self._again, [first, last])
        return int(np.delete(steps, self._again[a:b] - first).max(initial=0))


@dataclass(frozen=True)
class Speed:
    """Of the steps that count and have settled. By percentiles: the mean of step times is the mean of the hiccups."""

    tokens: int  # of all steps that count
    tokens_per_s: float
    mfu: float | None
    hfu: float | None  # with what is computed a second time
    memory_bytes_per_s: float | None  # through the memory of one device: what a step must move at least
    memory_share: float | None  # of its bandwidth
    step_s: float  # median
    step_p5_s: float
    step_p95_s: float
    data_wait_share: float
    device_s: dict[str, float]  # phases on a GPU's own timeline


def speed(found: History) -> Speed | None:
    if not len(found.steps):
        return None
    starts = {start.get("attempt"): start for start in found.starts}
    counted = found.steps.settled(found.starts)
    durations = counted.each_s() if found.script else counted.duration_s()
    step_s, whole_s = median(durations), float(durations.sum())
    p5_s, p95_s = nearest(durations, (0.05, 0.95))
    moved, peak = found.start.get("moved_bytes"), found.start.get("peak_bandwidth")
    moved_s = float(moved) / step_s if moved and step_s > 0 else None
    mfu, hfu = (counted.utilisation(name, starts) for name in ("flops", "hardware_flops"))
    return Speed(
        tokens=found.steps.total_tokens(),
        tokens_per_s=median(counted.tokens_per_s()),
        mfu=median(mfu) if mfu.size else None,
        hfu=median(hfu) if hfu.size else None,
        memory_bytes_per_s=moved_s,
        memory_share=moved_s / float(peak) if moved_s and peak else None,
        step_s=step_s,
        step_p5_s=p5_s,
        step_p95_s=p95_s,
        data_wait_share=counted.data_wait_s() / whole_s if whole_s else 0.0,
        device_s=on_device(counted),
    )
