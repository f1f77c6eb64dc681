"""After a device ran out of memory: fewer windows at once, where Shoal had chosen how many. Never imports torch.

The batch stays, more of it is accumulated; so the training is the same but for the order of sums. What a person has
chosen stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.guard.classify import Failure
from shoal.guard.history import History
from shoal.spec.mesh import Sizes, divisors
from shoal.spec.run import Run
from shoal.spec.stages import micro_batches_fit

KEY = "mesh.micro_batch"


@dataclass(frozen=True)
class Smaller:
    """A decision, and the run with it."""

    run: Run
    value: int
    why: str
    key: str = KEY


def smaller(run: Run, failure: Failure, history: History) -> Smaller | None:
    """None where that is not what happened, a person has chosen, or it cannot be less. Of islands their agents know
    more of a failure than this does."""
    if failure.cause != "device-memory" or KEY not in history.auto or run.fleet.islands > 1:
        return None
    now, sizes = int(run.mesh.micro_batch), Sizes.of(run.mesh)
    windows, schedule = run.train.batch // sizes.dp, str(run.mesh.schedule)
    fits = [
        count
        for count in divisors(windows)
        if count <= now / 2 and (sizes.pp == 1 or micro_batches_fit(windows // count, sizes.pp, schedule))
    ]
    if not fits:
        return None
    mesh = run.mesh.model_copy(update={"micro_batch": max(fits)})
    why = f"the device ran out of memory with {now} windows at once"
    return Smaller(run.model_copy(update={"mesh": mesh}), max(fits), why)
