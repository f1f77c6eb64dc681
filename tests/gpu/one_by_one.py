"""Trains many runs with the real worker and few starts: each rank is a process that takes part in one after the other.

    train_all(folder, jobs)                             # by the test, which never touches CUDA itself
    python -m tests.gpu.one_by_one FOLDER RANK          # one of the ranks that it starts

A rank joins and leaves a group for every run. With more ranks than GPUs they share them (shoal.shared_gpu). Nothing
here is about CUDA: with resources.device cpu the same runs over gloo, which is how the file itself is tried.
"""

from __future__ import annotations

import json
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

LIST = "jobs.json"


def train_all(folder: Path, jobs: Sequence[Job], timeout_s: float = 240) -> None:
    """All of them, each on as many ranks as it asks for; what a rank said is raised when one fails."""
    listed = []
    for job in dict.fromkeys(job.run.name for job in jobs):
        run, world = next((j.run, j.world) for j in jobs if j.run.name == job)
        run_dir = RunDir.of(run.name, folder)
        run_dir.path.mkdir(parents=True)
        run_dir.spec_file.write_text(dump(decide(run, folder, world).run))
        listed.append([run.name, world])
    (folder / LIST).write_text(json.dumps(listed))
    ranks = max(world for _, world in listed)
    processes = []
    for rank in range(ranks):
        with open(folder / f"rank-{rank}.log", "wb") as log:
            command = [sys.executable, "-m", "tests.gpu.one_by_one", str(folder), str(rank)]
            env = {**os.environ, SETTING: "1", "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
    watch = Stopwatch()
    try:
        while any(p.poll() is None for p in processes):
            failed = [rank for rank, p in enumerate(processes) if p.poll()]
            if failed or watch.quiet_s() > timeout_s:
                time.sleep(2.0)  # for the others' last words
                said = [(folder / f"rank-{r}.log").read_text()[-3000:] for r in failed or range(ranks)]
                raise RuntimeError(f"ranks {failed or 'hang'}:\n" + "\n---\n".join(said))
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(p.returncode == 0 for p in processes)


def rank(folder: Path, rank: int) -> None:
    from shoal.parallel.place import join, leave
    from shoal.spec import load
    from shoal.train.worker import work

    for number, (name, world) in enumerate(json.loads((folder / LIST).read_text())):
        if rank >= world:
            continue
        began = time.perf_counter()
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "SHOAL_RENDEZVOUS": f"file://{folder}/store-{number}",
        }
        run_dir = RunDir.of(name, folder)
        run = load(run_dir.spec_file).run
        place = join(run)
        work(run_dir, run, place, lambda: False)
        leave(place)
        print(f"{name} on {world}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    rank(Path(sys.argv[1]), int(sys.argv[2]))
