"""A journal sorted into what a report needs: the steps that count, those that were lost, and what happened between."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.observe.faults import Lives
from shoal.observe.phases import on_device
from shoal.observe.throughput import duration_s, mfu, of_peak, settled, tokens_per_s
from shoal.track.journal import Record


@dataclass(frozen=True)
class Break:
    """Where one attempt ended and the next took over."""

    reached: int  # the furthest step before it
    resumed_at: int  # steps that were kept
    failed: bool  # a failure, or somebody stopped and resumed the run


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
    if not found.steps:
        return None
    starts = {start.get("attempt"): start for start in found.starts}
    counted = settled(found.steps, found.starts)
    durations = sorted(duration_s(r) for r in counted)
    step_s = statistics.median(durations)
    waited_s = sum(float(r.get("time", {}).get("data_s", 0.0)) for r in counted)
    moved, peak = found.start.get("moved_bytes"), found.start.get("peak_bandwidth")
    moved_s = float(moved) / step_s if moved and step_s > 0 else None
    return Speed(
        tokens=sum(int(r.get("tokens", 0)) for r in found.steps),
        tokens_per_s=statistics.median(tokens_per_s(r) for r in counted),
        mfu=_median(mfu(r, starts.get(r.get("attempt"))) for r in counted),
        hfu=_median(_hfu(r, starts.get(r.get("attempt"))) for r in counted),
        memory_bytes_per_s=moved_s,
        memory_share=moved_s / float(peak) if moved_s and peak else None,
        step_s=step_s,
        step_p5_s=_quantile(durations, 0.05),
        step_p95_s=_quantile(durations, 0.95),
        data_wait_share=waited_s / sum(durations) if sum(durations) else 0.0,
        device_s=on_device(counted),
    )


def _hfu(step: Mapping[str, Any], start: Record | None) -> float | None:
    done, took_s = step.get("hardware_flops"), duration_s(step)
    return None if done is None or took_s <= 0 else of_peak(float(done) / took_s, start)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _quantile(ordered: list[float], q: float) -> float:
    """The nearest rank: a value that was measured."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
