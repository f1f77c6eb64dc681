"""Trains many runs with the real worker, several beside each other: each rank is a process of its own.

    train_all(folder, jobs)                             # by the test, which never touches CUDA itself
    python -m tests.gpu.train_apart FOLDER RUN           # one of the ranks that it starts

With more ranks than GPUs they share them (shoal.shared_gpu). A process joins one group only: on torch 2.11 one that
joins a second after it has left the first dies without a word. Nothing here is about CUDA: with resources.device cpu
the same runs over gloo, which is how the file itself is tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.shared_gpu import SETTING
from shoal.spec import dump
from shoal.track.rundir import RunDir
from shoal.train.decide import decide
from tests.patience import Stopwatch
from tests.train.matrix import Job


def train_all(folder: Path, jobs: Sequence[Job], timeout_s: float = 240) -> None:
    """All of them, as many at a time as there are cores for; what the ranks said is raised when one fails."""
    waiting = list({job.run.name: job for job in jobs}.values())
    running: list[tuple[str, list[subprocess.Popen[bytes]]]] = []
    watch = Stopwatch()
    try:
        while waiting or running:
            busy = sum(len(ranks) for _, ranks in running)
            while waiting and (not running or busy + waiting[0].world <= (os.cpu_count() or 1)):
                job = waiting.pop(0)
                running.append((job.run.name, _start(folder, job)))
                busy += job.world
            codes = {name: [p.poll() for p in ranks] for name, ranks in running}
            failed = [name for name, ended in codes.items() if any(ended)]
            if failed or watch.quiet_s() > timeout_s:
                time.sleep(2.0)  # for the others' last words
                raise RuntimeError("\n".join(_words(folder, name, codes[name]) for name in failed or codes))
            running = [(name, ranks) for name, ranks in running if None in codes[name]]
            time.sleep(0.1)
    finally:
        for process in (p for _, ranks in running for p in ranks):
            process.kill()
            process.wait()


def _start(folder: Path, job: Job) -> list[subprocess.Popen[bytes]]:
    run_dir = RunDir.of(job.run.name, folder)
    run_dir.path.mkdir(parents=True)
    run_dir.spec_file.write_text(dump(decide(job.run, folder, job.world).run))
    ranks = []
    for rank in range(job.world):
        env = os.environ | {
            SETTING: "1",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.world),
            "LOCAL_WORLD_SIZE": str(job.world),
            "SHOAL_RENDEZVOUS": f"file://{folder}/store-{job.run.name}",
        }
        with open(_log(folder, job.run.name, rank), "wb") as log:
            command = [sys.executable, "-m", "tests.gpu.train_apart", str(folder), job.run.name]
            ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
    return ranks


def _words(folder: Path, name: str, codes: Sequence[int | None]) -> str:
    said = [_log(folder, name, rank).read_text(errors="replace")[-2000:] for rank in range(len(codes))]
    return f"{name}: exit codes {list(codes)}\n" + "\n---\n".join(said)


def _log(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-{rank}.log"


def rank(folder: Path, name: str) -> None:
    from shoal.parallel.place import join, leave
    from shoal.spec import load
    from shoal.train.worker import work

    run_dir = RunDir.of(name, folder)
    run = load(run_dir.spec_file).run
    place = join(run)
    work(run_dir, run, place, lambda: False)
    leave(place)


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2])
