"""Trains runs with the real worker: each rank is a process of its own, several runs beside each other.

    crew.add(task(folder, job)); crew.done(job.run.name)     # by the test, which never touches CUDA itself
    python -m tests.gpu.train_apart FOLDER RUN               # one of the ranks that it starts

With more ranks than GPUs they share them (shoal.shared_gpu). A process joins one group only: on torch 2.11 one that
joins a second after it has left the first dies without a word. Nothing here is about CUDA: with resources.device cpu
the same runs over gloo, which is how the file itself is tried.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.decide.auto import decide
from shoal.journal.rundir import RunDir
from shoal.leaving import exit_code, leave_at_once
from shoal.shared_gpu import SETTING
from shoal.spec import dump
from tests.gpu.crew import Task
from tests.train.matrix import Job

ONE_THREAD = {SETTING: "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def task(folder: Path, job: Job, limit_s: float = 180.0) -> Task:
    """Its run directory is made here: what is wrong with the run is raised before anything starts."""
    run_dir = RunDir.of(job.run.name, folder)
    if not run_dir.spec_file.exists():
        run_dir.path.mkdir(parents=True)
        run_dir.spec_file.write_text(dump(decide(job.run, folder, job.world).run))
    command = [sys.executable, "-m", "tests.gpu.train_apart", str(folder), job.run.name]
    ranks = [(command, _environment(folder, job, rank)) for rank in range(job.world)]
    return Task(job.run.name, ranks, job.world, limit_s, stacks=True)


def _environment(folder: Path, job: Job, rank: int) -> dict[str, str]:
    return ONE_THREAD | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": str(job.world),
        "SHOAL_RENDEZVOUS": f"file://{folder}/store-{job.run.name}",
    }


def rank(folder: Path, name: str) -> int:
    from shoal.parallel.place import join, leave
    from shoal.spec import load
    from shoal.train.worker import work

    run_dir = RunDir.of(name, folder)
    run = load(run_dir.spec_file).run
    place = join(run)
    with _compiles_counted() as graphs:
        work(run_dir, run, place, lambda: False)
    (run_dir.path / f"graphs-{place.rank}.json").write_text(json.dumps(graphs))
    leave(place)
    return 0


def graphs_of(run_dir: RunDir, rank: int) -> list[int]:
    """How many graphs this rank had compiled after each step, and at its end."""
    return list(json.loads((run_dir.path / f"graphs-{rank}.json").read_text()))


@contextmanager
def _compiles_counted() -> Iterator[list[int]]:
    from torch._dynamo.utils import counters

    from shoal.train import loop

    graphs: list[int] = []
    step = loop.train_step

    def counted(t: loop.Training, number: int, gradient: Any) -> Any:
        record = step(t, number, gradient)
        graphs.append(counters["stats"]["unique_graphs"])
        return record

    loop.train_step = counted
    yield graphs
    graphs.append(counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    leave_at_once(exit_code(lambda: rank(Path(sys.argv[1]), sys.argv[2])))
