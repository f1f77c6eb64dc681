"""What a run that goes on has otherwise than its checkpoint, and its first steps will feel. One sentence each."""

from __future__ import annotations

import math

from shoal.spec.run import Run
from shoal.train.schedule import lr_ratio


def changes(before: Run, now: Run, step: int) -> list[str]:
    return [*_moments(before, now), *_rate(before, now, step)]


def _moments(before: Run, now: Run) -> list[str]:
    """Moments are means over as many steps as a beta says: after a change they are means over the old number first."""
    found = []
    old, new = before.train.optimizer, now.train.optimizer
    names = [f"train.optimizer.betas.{i}" for i in range(2)] + ["train.optimizer.muon_momentum"] * (new.name == "muon")
    pairs = zip(names, (*old.betas, old.muon_momentum), (*new.betas, new.muon_momentum), strict=False)
    for name, was, beta in pairs:
        if was != beta:
            found.append(
                f"{name} was {was:g} and is {beta:g}: the moments in the checkpoint are means by the old one, and "
                f"become those of the new one in about {math.ceil(1 / (1 - beta)):,} steps"
            )
    return found


def _rate(before: Run, now: Run, step: int) -> list[str]:
    """A run directory that was lost takes the past of the schedule along: the copies of its checkpoints know it."""
    if now.own.schedule is not None or any(past.until == step for past in now.train.schedule.past) or step >= now.steps:
        return []  # chosen
    had, has = (run.train.optimizer.lr * lr_ratio(run.train.schedule, step, run.steps) for run in (before, now))
    if math.isclose(had, has, rel_tol=1e-9) or before.train.optimizer.lr != now.train.optimizer.lr:
        return []
    return [
        f"the learning rate jumps at step {step:,}: the checkpoint's run had {had:.3g} there and this one has {has:.3g}"
        " (its run directory was not there when it was given another length or schedule)"
    ]
