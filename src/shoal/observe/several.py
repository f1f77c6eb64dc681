"""Several runs beside each other, the best first: how far each came, what it learned, and the settings that differ."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal import readable
from shoal.errors import ShoalError
from shoal.journal.reading import told
from shoal.journal.rundir import RunDir
from shoal.observe.curves import draw_many, smooth
from shoal.observe.history import History, history, speed
from shoal.observe.plot import WIDTH, Points, plot_many, shown
from shoal.observe.report import best_eval, nearby
from shoal.observe.status import Status, status_of
from shoal.spec import load
from shoal.spec.begun import flat
from shoal.spec.describe import as_written

MOST_DRAWN = 12  # curves in one picture; the table has all
MARKS = string.ascii_uppercase + string.ascii_lowercase
LAST = 10  # the loss of a run is the mean of its last steps: one batch alone is luck


@dataclass(frozen=True)
class One:
    status: Status
    history: History
    settings: dict[str, Any]  # by dotted name; empty where its run file cannot be read

    @property
    def loss(self) -> float | None:
        last = self.history.steps.newest(LAST).column("loss").tolist()
        return sum(last) / len(last) if last else None

    @property
    def eval_loss(self) -> float | None:
        best = best_eval(self.history)
        return None if best is None else best[1]

    @property
    def rank(self) -> tuple[bool, float]:
        """By held-out data where there are any: such a run comes before one without."""
        loss = self.eval_loss if self.eval_loss is not None else self.loss
        return self.eval_loss is None, math.inf if loss is None or math.isnan(loss) else loss


@dataclass(frozen=True)
class Several:
    runs: list[One]  # the best first
    differ: dict[str, list[Any]]  # a value for each run, in their order
    picture: Path | None


def several(run_dirs: Sequence[RunDir], pictures: bool = True) -> Several:
    runs = sorted((_one(run_dir) for run_dir in run_dirs), key=lambda one: one.rank)
    known = [one.settings for one in runs if one.settings]
    keys = dict.fromkeys(key for settings in known for key in settings)
    differ = {
        key: [one.settings.get(key) for one in runs]
        for key in keys
        if key != "name" and any(s.get(key) != known[0].get(key) for s in known)
    }
    shown = [one for one in runs if len(one.history.steps)][:MOST_DRAWN]
    if not (pictures and shown):
        return Several(runs, differ, None)
    labels = [(f"{MARKS[i]}  {one.status.name}", one.history) for i, one in enumerate(shown)]
    about = "the best first" + (f", {len(runs) - len(shown)} more not drawn" if len(runs) > len(shown) else "")
    return Several(runs, differ, draw_many(labels, about, _place(run_dirs[0].workspace, runs)))


def as_json(s: Several) -> dict[str, Any]:
    return {
        "runs": [
            {
                **one.status.as_json(),
                "final_loss": readable.json_number(one.loss),
                "best_eval_loss": readable.json_number(one.eval_loss),
                "settings": {key: values[i] for key, values in s.differ.items()},
            }
            for i, one in enumerate(s.runs)
        ],
        "differ": list(s.differ),
        "picture": None if s.picture is None else str(s.picture),
    }


def as_text(s: Several) -> str:
    marks = [_mark(i) for i in range(len(s.runs))]
    rows = [["", "RUN", "STATUS", "STEP", "LOSS", "BEST EVAL", "TOKENS/S"]]
    for mark, one in zip(marks, s.runs, strict=True):
        status, measured = one.status, speed(one.history)
        step = f"{status.step}/{status.total}" if status.total else str(status.step)
        rate = "-" if measured is None else readable.count(measured.tokens_per_s)
        rows.append(
            [mark, status.name, status.status, step, readable.number(one.loss), readable.number(one.eval_loss), rate]
        )
    sections = ["\n".join(_aligned(rows))]
    if s.differ:
        table = [["what differs", *marks]]
        table += [[key, *(_shown(value) for value in values)] for key, values in s.differ.items()]
        sections.append("\n".join(_aligned(table)))
    else:
        sections.append("their settings are the same")
    curves = [(mark, one.history) for mark, one in zip(marks, s.runs, strict=True) if len(one.history.steps)]
    if curves:
        sections.append(f"loss\n{plot_many(_curves(curves[:MOST_DRAWN]))}")
    if s.picture is not None:
        sections.append(f"drawn: {nearby(s.picture)}")
    return "\n\n".join(sections)


def _one(run_dir: RunDir) -> One:
    try:
        settings = flat(load(run_dir.spec_file).run.model_dump(mode="json"))
    except ShoalError:
        settings = {}  # of another version, or gone: its journal is still worth a look
    return One(status_of(run_dir), history(told(run_dir.journal_file)), settings)


def _curves(runs: list[tuple[str, History]]) -> list[tuple[str, Points]]:
    smoothed = []
    for mark, found in runs:
        steps, losses = found.steps.column("step"), found.steps.column("loss")
        finite = np.isfinite(losses)
        smoothed.append((mark, steps[finite], smooth(losses[finite], int(finite.sum()) // 40)))
    ends = [float(step) for _, steps, _ in smoothed for step in (*steps[:1], *steps[-1:])]
    return [(mark, shown(steps, losses, ends, WIDTH)) for mark, steps, losses in smoothed]


def _place(workspace: Path, runs: list[One]) -> Path:
    names = "+".join(one.status.name for one in sorted(runs, key=lambda one: one.status.name))
    return workspace / "reports" / f"{re.sub(r'[^A-Za-z0-9._+-]', '_', names)[:100]}.png"


def _mark(place: int) -> str:
    return MARKS[place] if place < len(MARKS) else "-"


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, dict) and "path" in item for item in value):
        return " ".join(Path(str(item["path"])).name for item in value)  # folders of a mixture
    text = "-" if value is None else value if isinstance(value, str) else as_written(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
