"""Closes how long a run is: the steps of so many epochs or tokens, and a warm-up that is a share of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.decide.decision import Choices, Decision
from shoal.errors import DataError, SpecError
from shoal.spec.length import LONGEST_WARMUP, USUAL_WARMUP, steps_for_epochs, warmup_steps
from shoal.spec.rules import broken, known_steps
from shoal.spec.run import Run


@dataclass(frozen=True)
class Measured:
    run: Run
    decisions: tuple[Decision, ...]


def measured(run: Run, workspace: Path, begun: int = 0) -> Measured:
    """The run with its steps known, and its warm-up in steps: a longer run that goes on keeps the warm-up it had. Where
    it warms up again after `begun` steps, a share is one of those that are left."""
    if run.foreign_work is not None:
        verb = "batch" if run.batch is not None else "run"
        raise SpecError(
            f"run '{run.name}' is {run.foreign_work}: nobody knows how many steps it takes; `shoal {verb}` runs it."
        )
    choices = Choices()
    steps = run.steps if run.train.steps != "auto" else choices.choose("train.steps", "auto", *_steps(run, workspace))
    schedule, warmup = run.train.schedule, run.train.schedule.warmup_steps
    if isinstance(warmup, str) and run.own.schedule is None:
        of = steps - begun if schedule.prolong == "rewarm" and begun < steps else steps
        found = warmup_steps(warmup, of)
        most = ", at most that" if warmup == "auto" and found == LONGEST_WARMUP else ""
        share = f"{USUAL_WARMUP:.0%}" if warmup == "auto" else warmup
        choices.choose("train.schedule.warmup_steps", "auto", found, f"{share} of {of:,} steps" + most)
        schedule = schedule.model_copy(update={"warmup_steps": found})
    closed = {"steps": steps, "epochs": None, "tokens": None, "schedule": schedule}
    run = run.model_copy(update={"train": run.train.model_copy(update=closed)})
    if choices.made and (problems := broken(run)):
        raise SpecError("\n".join(f"{sentence}." for _, sentence in problems))
    return Measured(run, tuple(choices.made))


def with_steps(run: Run, workspace: Path, begun: int = 0) -> Run:
    return measured(run, workspace, begun).run


def _steps(run: Run, workspace: Path) -> tuple[int, str]:
    """How many, and why."""
    batch, epochs = run.train.batch, run.train.epochs
    if epochs is None:
        known = known_steps(run)
        if known is None:
            raise SpecError("train.steps is missing, and neither train.epochs nor train.tokens is given; set one.")
        return known, f"{run.train.tokens:,} tokens in steps of {batch:,} x {run.data.seq_len:,}"
    windows = _windows(run, workspace)
    return steps_for_epochs(epochs, windows, batch), f"{epochs:g} x {windows:,} windows in steps of {batch:,}"


def _windows(run: Run, workspace: Path) -> int:
    from shoal.data.sources import open_sources
    from shoal.data.windows import Windows

    try:
        sources = open_sources(run.data.train, run.data, workspace, look=False)
    except DataError as e:
        raise DataError(
            f"train.epochs {run.train.epochs:g}: how many steps that are is known once data.train can be read here, "
            f"and it cannot: {str(e).rstrip('.')}; train.steps or train.tokens need no data."
        ) from None
    return sum(Windows.of(sources, run.data).sizes)
