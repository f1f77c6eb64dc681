"""One shape, learned with one setting of optimizer and schedule after another, in this process: the same windows, start
values and steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.to_loss.run_shoal import _place, _run
from benchmarks.to_loss.text import Reader
from benchmarks.to_loss.trials import FULL, TINY, Trial

from shoal.kernels.rounding import Spot
from shoal.parallel.build import build
from shoal.parallel.laid import Laid
from shoal.spec.run import Optimizer, Schedule
from shoal.train import optim
from shoal.train.balance import balance
from shoal.train.optim import Optimizers
from shoal.train.schedule import lr_ratio

NEAREST = 0x80008000  # random numbers that are all one half


@dataclass(frozen=True)
class Setting:
    name: str
    optimizer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    z_loss: float = 0.0
    nearest: bool = False  # 16 bits are rounded to the nearest, as they were; by the plain update


@dataclass(frozen=True)
class Curve:
    setting: Setting
    points: list[tuple[int, list[float]]]  # step, held-out loss of each seed

    @property
    def end(self) -> float:
        return mean(self.points[-1][1])

    @property
    def spread(self) -> float:
        """Between the seeds, at the end."""
        return max(self.points[-1][1]) - min(self.points[-1][1])


def chosen(tiny: bool, shape: str = "88m") -> Trial:
    """That shape; without a GPU a tiny one, to try the code."""
    if not tiny and not torch.cuda.is_available():
        print("no GPU here: the tiny model, to try the code", file=sys.stderr)
    return FULL[shape] if torch.cuda.is_available() and not tiny else TINY["88m"]


def curves(trial: Trial, data: Path, settings: Sequence[Setting], seeds: int) -> Iterator[Curve]:
    place = _place()
    model = build(_run(trial, place), place)
    reader = Reader(data, trial.seq, trial.batch)
    for setting in settings:
        by_seed = [_learned(model, trial, reader, setting, seed) for seed in range(seeds)]
        looks = [round(trial.steps * i / trial.points) for i in range(1, trial.points + 1)]
        yield Curve(setting, [(step, [ends[i] for ends in by_seed]) for i, step in enumerate(looks)])


def _learned(model: Laid, trial: Trial, reader: Reader, setting: Setting, seed: int) -> list[float]:
    for decoder in model.decoders:
        decoder.init_weights(seed)
        decoder.head.z_loss = setting.z_loss
    run = _run(trial, model.place)
    spec = Optimizer.model_validate({"lr": trial.lr, **setting.optimizer})
    schedule = Schedule.model_validate({**trial.schedule.model_dump(), **setting.schedule})
    optimizers = Optimizers(spec, model.named_parameters(), seed)
    held_out, found = reader.held_out(trial.held_out), []
    looks = {round(trial.steps * i / trial.points) for i in range(1, trial.points + 1)}
    with _to_the_nearest() if setting.nearest else _as_it_is():
        for step in range(trial.steps):
            batch = reader.batch(step)
            model.backward([batch])
            _, factor = model.norm(1 / batch.target_count, run.train.clip)
            optimizers.step(lr_ratio(schedule, step, trial.steps), factor)
            balance(model, step + 1, lambda *_, **__: None)
            if step + 1 in looks:
                total = sum(float(model.loss([one])) for one in held_out)
                found.append(total / sum(one.target_count for one in held_out))
                print(f"\r{setting.name}, seed {seed}: step {step + 1}/{trial.steps}, held-out {found[-1]:.4f} ",
                      end="", file=sys.stderr, flush=True)  # fmt: skip
    print(file=sys.stderr, flush=True)
    return found


@contextmanager
def _to_the_nearest() -> Iterator[None]:
    def half(spot: Spot, step: int, like: torch.Tensor) -> torch.Tensor:
        return torch.full(like.shape, NEAREST, dtype=torch.int64, device=like.device)

    with patch.object(Spot, "noise", half), patch.object(optim, "kernels", SimpleNamespace(fit=lambda _: False)):
        yield


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def table(found: Sequence[Curve], against: Curve) -> None:
    """Held-out losses along the way, and the end beside that of one of them."""
    looks = [step for step, _ in against.points]
    some = sorted({looks[round(i * (len(looks) - 1) / 4)] for i in range(5)})
    print(f"{'setting':<36}" + "".join(f"{'step ' + str(step):>12}" for step in some) + f"{'end':>10}{'seeds':>9}")
    for one in found:
        losses = {step: mean(by_seed) for step, by_seed in one.points}
        beside = f"{100 * (one.end / against.end - 1):+.2f}%"
        cells = "".join(f"{losses[step]:>12.4f}" for step in some)
        print(f"{one.setting.name:<36}{cells}{beside:>10}{one.spread:>9.4f}", flush=True)
