"""Shoal's own model, optimizers and step, one rule of start values after another. Argument: a file with the jobs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.to_loss.curve import learn
from benchmarks.to_loss.jobs import read
from benchmarks.to_loss.text import Reader
from benchmarks.to_loss.trials import Job, Trial

from shoal.data.windows import Batch
from shoal.parallel.build import build
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.model import Model
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.train.balance import balance
from shoal.train.optim import Optimizers


def main(file: Path) -> None:
    place = _place()
    for trial, data, jobs in read(file):
        model = build(_run(trial, place), place)
        reader = Reader(data, trial.seq, trial.batch)
        for job in jobs:
            learn("shoal", job, trial, reader, Shoal(model, trial, job))


class Shoal:
    """One model for all jobs of a shape, begun anew for each: nothing is compiled twice."""

    def __init__(self, model: Laid, trial: Trial, job: Job) -> None:
        self._model, self._taken = model, 0
        spec = Model.model_validate({**trial.model, "vocab_size": trial.vocab, "init": job.init})
        for decoder in model.decoders:
            decoder.shape = replace(decoder.shape, init=shape_of(spec).init)
            decoder.init_weights(job.seed)
        run = _run(trial, model.place, job.optimizer)
        self._clip = run.train.clip
        self._optimizers = Optimizers(run.train.optimizer, model.named_parameters())

    def step(self, batch: Batch, ratio: float) -> None:
        self._model.backward([batch])
        _, factor = self._model.norm(1 / batch.target_count, self._clip)
        self._optimizers.step(ratio, factor)
        self._taken += 1
        balance(self._model, self._taken, lambda *_, **__: None)

    def loss(self, batch: Batch) -> float:
        return float(self._model.loss([batch]))


def _run(trial: Trial, place: Place, optimizer: str = "adamw") -> Run:
    gpu = place.device.type == "cuda"
    axes = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"), 1)
    return Run.model_validate(
        {
            "name": trial.name,
            "model": {**trial.model, "vocab_size": trial.vocab},
            "data": {"train": "python", "seq_len": trial.seq},
            "train": {
                "steps": trial.steps,
                "batch": trial.batch,
                "precision": "bf16" if gpu else "fp32",
                "compile": gpu and "experts" not in trial.model,
                "kernels": "triton" if gpu else "plain",
                "optimizer": {"name": optimizer, "lr": trial.lr, "muon_lr": 0.02},  # as what is claimed was measured
            },
            "mesh": {**axes, "micro_batch": trial.batch, "recompute": "none"},
            "resources": {"device": place.device.type, "processes": 1},
        }
    )


def _place() -> Place:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # for numbers this small a second one only waits
        return Place(0, 1, torch.device("cpu"))
    torch.cuda.set_device(0)
    return Place(0, 1, torch.device("cuda", 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
