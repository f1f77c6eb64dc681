"""The ways of a check, trained by the real worker in forks of this process instead of real starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.train.tiny import make_run

from shoal.check.check import Result, check, planned
from shoal.check.jobs import Job
from shoal.check.trained import Trained, environment, learning
from shoal.decide.auto import decide
from shoal.errors import Stopped
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.own.carry import carry
from shoal.parallel.place import join
from shoal.spec.run import Run
from shoal.train.worker import StopFlag, work


def a_run(data: Path, folder: Path, code: str, **own: Any) -> Run:
    """With a module `mine` of that code, in the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(code)
    return make_run(data, own={**own, "folder": str(folder)})


def checked(run: Run, folder: Path, *rows: str, steps: int = 4, batch: int = 4) -> Result:
    todo = planned(run, steps, batch, (), folder, rows)
    return check(todo, in_forks(folder), rows)


def in_forks(folder: Path) -> Callable[[Job], Trained]:
    def train(job: Job) -> Trained:
        decided, run_dir = decide(job.run, folder).run, RunDir.of(job.name, folder)
        run_dir.path.mkdir(parents=True)
        carry(decided, run_dir)

        def rank(rank: int, world: int) -> bool:
            os.environ.update(environment(job, folder))
            try:
                work(run_dir, decided, join(decided), StopFlag())
            except Stopped:
                return True
            return False

        if run_ranks(rank, job.world)[0]:
            run_ranks(rank, job.world)
        return Trained.of(records(run_dir.journal_file), learning(job, folder))

    return train
