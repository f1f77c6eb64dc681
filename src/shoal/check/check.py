"""A check of a run: all its ways are trained, one after the other, and compared."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.check.jobs import ROWS, WHOLE, Job, jobs
from shoal.check.rows import Row, rows
from shoal.check.trained import Trained
from shoal.decide.auto import decide
from shoal.decide.checks import trainable
from shoal.errors import TRANSIENT, WRONG_ENVIRONMENT, WRONG_USAGE, SetupError, ShoalError, SpecError, TransientError
from shoal.spec.run import Run

Train = Callable[[Job], Trained]
_KINDS: dict[int, type[ShoalError]] = {WRONG_USAGE: SpecError, WRONG_ENVIRONMENT: SetupError, TRANSIENT: TransientError}


@dataclass(frozen=True)
class Result:
    run: Run  # as it was trained
    rows: list[Row]
    time: float

    @property
    def failed(self) -> list[str]:
        return [row.name for row in self.rows if not row.passed]

    def as_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "passed": not self.failed,
            "failed": self.failed,
            "time": self.time,
            "shoal": __version__,
            "steps": run.steps,
            "batch": run.train.batch,
            "precision": run.train.precision,
            "device": run.resources.device,
            "model": run.model.model_dump(mode="json"),
            "own": run.own.model_dump(mode="json", include={*type(run.own).model_fields} - {"folder", "changed"}),
            "rows": [row.as_json() for row in self.rows],
        }


def check(todo: list[Job], train: Train, wanted: Collection[str] = tuple(ROWS)) -> Result:
    """`todo`: what `planned` gave for these rows."""
    trained: dict[str, Trained] = {}
    for number, job in enumerate(todo, 1):
        print(f"check: run {number} of {len(todo)}, {job.about}", file=sys.stderr, flush=True)
        trained[job.name] = train(job)
        if job.name == WHOLE and not trained[WHOLE].done:
            failed = trained[WHOLE]
            kind = _KINDS.get(failed.code, TransientError)
            raise kind(
                f"the run fails as it is, so there is nothing to compare: {failed.words.removeprefix('shoal: ')}"
            )
    return Result(todo[0].run, rows(todo[0].run, trained, wanted), time.time())


def planned(
    run: Run, steps: int, batch: int, told: Collection[str], workspace: Path, wanted: Collection[str] = tuple(ROWS)
) -> list[Job]:
    """What has to be trained. What this machine or this data cannot do is refused now."""
    todo = jobs(run, steps, batch, told, wanted)
    for job in todo:
        trainable(job.run)
        decide(job.run, workspace)
    return todo
