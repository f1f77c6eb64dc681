"""What every system is asked: the same steps on the same windows, with looks at the held-out text between them."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from statistics import median
from typing import Any, Protocol

import torch
from benchmarks.to_loss.text import Reader
from benchmarks.to_loss.trials import Job, Trial

from shoal.data.windows import Batch
from shoal.train.schedule import lr_ratio


class Learner(Protocol):
    def step(self, batch: Batch, ratio: float) -> None:
        """One update at `ratio` of the peak learning rate."""

    def loss(self, batch: Batch) -> float:
        """Summed over the targets."""


def learn(system: str, job: Job, trial: Trial, reader: Reader, learner: Learner) -> None:
    """Prints the curve as one line of JSON: [tokens, held-out loss] of each look, and milliseconds of a step."""
    held_out = reader.held_out(trial.held_out)
    said = f"{trial.name}: {system}, {job.init}, {job.optimizer}, seed {job.seed}"
    points, times, done = [], [], 0
    for look in range(1, trial.points + 1):
        upto = round(trial.steps * look / trial.points)
        began = time.perf_counter()
        for step in range(done, upto):
            learner.step(reader.batch(step), lr_ratio(trial.schedule, step, trial.steps))
        _wait()
        times.append((time.perf_counter() - began) / (upto - done))
        loss, done = _mean(learner, held_out), upto
        points.append([done * trial.step_tokens, loss])
        print(f"\r{said}: step {done}/{trial.steps}, held-out {loss:.4f} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr, flush=True)
    # The first stretch has compiled, in the first job at least.
    told: dict[str, Any] = {"system": system, **asdict(job), "points": points, "ms": 1e3 * median(times[1:])}
    print(json.dumps(told), flush=True)


def _mean(learner: Learner, batches: list[Batch]) -> float:
    return sum(learner.loss(batch) for batch in batches) / sum(batch.target_count for batch in batches)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
