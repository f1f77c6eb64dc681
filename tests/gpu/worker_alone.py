"""Runs the real worker in this process, alone on the GPU, and prints its peak of memory and what the plan had said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from shoal.decide.auto import decide
from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.plan.memory import memory
from shoal.spec.shape import shape_of
from shoal.train.saves import Saves
from shoal.train.worker import work
from tests.train.tiny import make_run


def main(workspace: Path, changes: dict[str, object], saves: bool) -> None:
    run = decide(make_run(workspace / "data", **changes), workspace, 1).run
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True)
    if not saves:
        Saves.now = lambda *args, **kwargs: None  # type: ignore[method-assign]
    place = join(run)
    torch.cuda.reset_peak_memory_stats()
    work(run_dir, run, place, lambda: False)
    planned = memory(run, shape_of(run.model))
    print(
        json.dumps(
            {"peak_bytes": torch.cuda.max_memory_allocated(), "planned_bytes": planned.total, "moment": planned.moment}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), saves="--no-save" not in sys.argv)
