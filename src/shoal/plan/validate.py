"""How wrong the planner is: predictions beside published runs, by source, by machine and over all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.plan.case import Cases, Column
from shoal.plan.constants import Constants, fitted
from shoal.plan.footprint import footprint
from shoal.plan.published import Published, Refused, read
from shoal.plan.step import tokens_per_second

# Runs of one model on one machine that a rank correlation is worth being computed of.
ENOUGH = 5


@dataclass(frozen=True)
class Errors:
    """Of absolute relative errors."""

    rows: int
    median: float
    mean: float
    p90: float
    bias: float  # the median with its sign

    @staticmethod
    def of(errors: Sequence[float] | Column) -> Errors | None:
        if not len(errors):
            return None
        signed = np.asarray(errors, dtype=float)
        off = np.abs(signed)
        found = (np.median(off), np.mean(off), np.quantile(off, 0.9), np.median(signed))
        return Errors(len(signed), *(round(float(x), 4) for x in found))


@dataclass(frozen=True)
class Ranked:
    """How well runs of one model on one machine are put in order."""

    model: str
    machine: str
    runs: int
    spearman: float
    regret: float  # the best measured speed over that of the run which was predicted to be the fastest, less one


@dataclass(frozen=True)
class Validation:
    rows: int
    refused: dict[str, int]
    overall: dict[str, Errors | None]  # speed, dense, experts, memory
    by_source: dict[str, dict[str, Errors | None]]
    by_machine: dict[str, dict[str, Errors | None]]
    ranked: list[Ranked]
    layouts: list[Ranked]  # of these, those that differ in nothing but the layout
    predictions: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def validate(path: Path, c: Constants | None = None, folders: Sequence[Path] = ()) -> Validation:
    """`folders`: of hardware entries of one's own."""
    c = c or fitted()
    found = list(read(path, folders))
    rows = [row for row in found if isinstance(row, Published)]
    refused = Counter(row.why for row in found if isinstance(row, Refused))
    if not rows:
        return Validation(
            len(found), dict(refused), dict.fromkeys(("speed", "dense", "experts", "memory")), {}, {}, [], [], []
        )
    cases = Cases.of([row.case for row in rows])
    speeds, memories = tokens_per_second(cases, c), footprint(cases).total / 1e9
    predictions = [
        {
            "row": row.row,
            "source": row.source,
            "model": row.model,
            "machine": row.machine,
            "devices": row.case.devices,
            "dense": row.dense,
            "tokens_s": row.tokens_s,
            "predicted_tokens_s": round(float(speed), 1),
            "speed_error": None if row.tokens_s is None else float(speed) / row.tokens_s - 1,
            "memory_gb": row.memory_gb,
            "predicted_memory_gb": round(float(memory), 2),
            "memory_error": None if row.memory_gb is None else float(memory) / row.memory_gb - 1,
        }
        for row, speed, memory in zip(rows, speeds, memories, strict=True)
    ]
    return Validation(
        rows=len(found),
        refused=dict(refused),
        overall=_summary(predictions),
        by_source=_by(predictions, lambda p: p["source"]),
        by_machine=_by(predictions, lambda p: p["machine"]),
        ranked=_ranks(rows, speeds, strict=False),
        layouts=_ranks(rows, speeds, strict=True),
        predictions=predictions,
    )


def spearman(a: Sequence[float] | Column, b: Sequence[float] | Column) -> float:
    """Rank correlation; equal numbers share their rank."""
    ranks = [_rank(np.asarray(x, dtype=float)) for x in (a, b)]
    spread = float(np.std(ranks[0]) * np.std(ranks[1]))
    if spread == 0:
        return 0.0
    return float(np.mean((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())) / spread)


def _rank(values: Column) -> Column:
    return np.array([np.mean(np.flatnonzero(np.sort(values) == value)) for value in values])


def _summary(predictions: Sequence[dict[str, Any]]) -> dict[str, Errors | None]:
    speed = [p for p in predictions if p["speed_error"] is not None]
    return {
        "speed": Errors.of([p["speed_error"] for p in speed]),
        "dense": Errors.of([p["speed_error"] for p in speed if p["dense"]]),
        "experts": Errors.of([p["speed_error"] for p in speed if not p["dense"]]),
        "memory": Errors.of([p["memory_error"] for p in predictions if p["memory_error"] is not None]),
    }


def _by(
    predictions: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], str]
) -> dict[str, dict[str, Errors | None]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for prediction in predictions:
        groups[key(prediction)].append(prediction)
    return {name: _summary(group) for name, group in sorted(groups.items())}


def _ranks(rows: Sequence[Published], speeds: Column, strict: bool) -> list[Ranked]:
    """Of runs of the same model on the same machine; `strict`: which differ in nothing but the layout."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.tokens_s is not None:
            case = row.case
            same = (row.source, case.devices, case.batch, case.seq, case.precision) if strict else ()
            groups[(row.model, row.machine, *same)].append(i)
    found = []
    for (model, machine, *_), at in sorted(groups.items(), key=lambda item: str(item[0])):
        if len({(rows[i].case.plan, rows[i].case.devices, rows[i].case.seq) for i in at}) < ENOUGH:
            continue
        measured, predicted = np.array([rows[i].tokens_s for i in at], dtype=float), speeds[at]
        regret = float(measured.max() / measured[int(np.argmax(predicted))] - 1)
        found.append(Ranked(model, machine, len(at), round(spearman(predicted, measured), 3), round(regret, 4)))
    return found
