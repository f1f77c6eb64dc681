"""The ways in which a check trains a run: the same model, code and data, each with one thing changed."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from shoal.errors import SpecError
from shoal.spec.engine import Engine
from shoal.spec.run import Checkpoint, Data, Eval, Fleet, Guard, Mesh, Run, Track

WHOLE = "whole"
ROWS = {
    "repeat": (WHOLE, "again"),
    "resume": (WHOLE, "resumed"),
    "dp_shard": (WHOLE, "dp_shard"),
    "dp_replicate": (WHOLE, "dp_replicate"),
    "accumulation": (WHOLE, "accumulated"),
    "gradients": (WHOLE,),
}
"""What is compared, and what has to be trained for it."""
STEPS, BATCH = 6, 4


@dataclass(frozen=True)
class Job:
    name: str
    run: Run
    world: int = 1
    stop_after: int | None = None  # then it is resumed

    @property
    def about(self) -> str:
        if self.stop_after is not None:
            return f"stopped after step {self.stop_after} and resumed"
        what = {WHOLE: "as it is", "again": "the same again", "accumulated": "mesh.micro_batch=1"}
        return what.get(self.name, f"mesh.{self.name}=2 on two processes")


def jobs(
    run: Run, steps: int, batch: int, told: Collection[str] = (), rows: Collection[str] = tuple(ROWS)
) -> list[Job]:
    """Those that the rows need. `told`: names that the command line sets, of which a check has an opinion."""
    base = _base(run, steps, batch, told)
    made = {
        WHOLE: Job(WHOLE, base),
        "again": Job("again", base),
        "resumed": Job("resumed", base, stop_after=steps // 2),
        "dp_shard": Job("dp_shard", _laid(base, batch // 2, dp_shard=2), 2),
        "dp_replicate": Job("dp_replicate", _laid(base, batch // 2, dp_replicate=2), 2),
        "accumulated": Job("accumulated", _laid(base, 1)),
    }
    wanted = {name for row in rows for name in ROWS[row]}
    return [
        Job(job.name, job.run.model_copy(update={"name": job.name}), job.world, job.stop_after)
        for job in made.values()
        if job.name in wanted
    ]


def _base(run: Run, steps: int, batch: int, told: Collection[str]) -> Run:
    """On one process, all windows at once, in float32: what is compared are the run's own parts, not its layout."""
    if remote := next((s.path for s in run.data.train if "://" in s.path), None):
        raise SpecError(
            f"data.train is {remote}: a check reads data that is on this machine; name a folder, data.train=FOLDER."
        )
    train: dict[str, Any] = {"steps": steps, "epochs": None, "tokens": None, "batch": batch}
    train |= {} if "train.precision" in told else {"precision": "fp32"}
    train |= {} if "train.compile" in told else {"compile": False}
    if run.own.schedule is None:  # at its peak soon: a rate that has hardly begun to rise would hide a wrong update
        shape = {"warmup_steps": min(2, steps), "decay_steps": "auto", "prolong": None, "past": ()}
        train["schedule"] = run.train.schedule.model_copy(update=shape)
    cores = len(os.sched_getaffinity(0))
    there = {"device": "cpu" if run.resources.device == "auto" else run.resources.device}
    threads = run.resources.threads if run.resources.threads != "auto" else max(1, cores // 2)
    return _laid(
        run.model_copy(
            update={
                "train": run.train.model_copy(update=train),
                "data": run.data.model_copy(update={"eval": Data.model_fields["eval"].default}),
                "eval": Eval(),
                "resources": run.resources.model_copy(update={**there, "threads": threads}),
                "engine": Engine(),
                "fleet": Fleet(),
                "checkpoint": Checkpoint(every=0, memory="off", background=False),
                "track": Track(mlflow=False),
                "guard": Guard(restarts=0, numerics="stop", spikes="off", grace_s=run.guard.grace_s),
            }
        ),
        batch,
    )


def _laid(run: Run, micro_batch: int, **axes: int) -> Run:
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, **axes}
    mesh = Mesh(**sizes, micro_batch=micro_batch, recompute=run.mesh.recompute)
    world = axes.get("dp_shard", 1) * axes.get("dp_replicate", 1)
    resources = run.resources.model_copy(update={"processes": world})
    return run.model_copy(update={"mesh": mesh, "resources": resources})
