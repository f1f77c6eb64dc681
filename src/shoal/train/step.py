"""The optimizer step that every driver drives: samples, the gradient of their sum, one update by all of it or none.

    gradient    of the loss summed over the targets of some samples, into the parameters
    update      by that sum, whatever has made it whole: a mesh, a fleet of islands, the stages of a cut model

A gradient is a sum until the update divides it by the number of targets of the whole batch. That is right for any
split, packing and mask, and parts of it can be added up in any way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from shoal.data.windows import Batch
from shoal.parallel.clip import read_later, unless_finite
from shoal.parallel.laid import Laid
from shoal.spec.run import Run
from shoal.train.balance import forget
from shoal.train.clock import Clock
from shoal.train.hooks import NONE, Hooks, Moment
from shoal.train.numerics import NotFinite, Numerics
from shoal.train.optim import Optimizers
from shoal.train.seed import seed_step

Settle = Callable[[], object]


class Taken(NamedTuple):
    """What an update was."""

    loss: float  # the mean over the targets
    grad_norm: float  # of the mean, before clipping
    lr: float


class Step:
    def __init__(self, run: Run, model: Laid, optimizers: Optimizers, hooks: Hooks = NONE) -> None:
        self._run, self._model, self._optimizers, self._hooks = run, model, optimizers, hooks

    def samples(self, at: Moment, batches: list[Batch]) -> list[Batch]:
        """What is computed in the place of these."""
        return self._hooks.batch(at, batches)

    def gradient(
        self, at: Moment, draw: tuple[int, int], batches: list[Batch], clock: Clock, token_weight: float = 1.0
    ) -> Tensor:
        """Adds up the gradient of the loss over all targets of these samples, and those of this mesh's other
        processes; returns that sum of losses. What is random in it is drawn by the run's seed and `draw`, which is
        (step, reader), and not the same for two readers."""
        seed_step(self._run.seed, *draw)
        part = self._model.backward(batches, clock.mark, token_weight)
        clock.mark("clip")
        loss = self._model.total(part)
        self._hooks.backward(at)
        return loss

    def update(
        self, at: Moment, loss: Tensor, targets: float, ratio: float, clock: Clock, settle: Settle = lambda: None
    ) -> Taken:
        """The mean over all targets is clipped and applied, at `ratio` of the peak learning rate. `NotFinite`, on all
        processes, where its loss or norm is not finite: then nothing has changed. `settle` is called before the
        weights change."""
        self._hooks.update(at, targets)
        taken = self._optimizers.taken
        mean = loss / targets
        norm, factor = self._model.norm(1 / targets, self._run.train.clip)
        # Where the update can skip itself it is launched before the host knows the numbers: no GPU waits for that.
        numbers = read_later(mean, norm)
        try:
            if not self._optimizers.skips_by_itself:
                Numerics.check(at.batch, numbers(), clock.begin)
            clock.lap("compute_s", then="optimizer")
            settle()
            lr = self.apply(ratio, unless_finite(factor, mean, norm))
            clock.waits("clip")
            found = Numerics.check(at.batch, numbers(), clock.begin)  # here alone the host waits for a GPU
            clock.waits("optimizer")
        except NotFinite:
            self._optimizers.forget(taken)
            forget(self._model)
            raise
        return Taken(*found, lr)

    def apply(self, ratio: float, factor: Tensor) -> float:
        """The weights change by `factor` times the gradient that stands in the parameters; returns the learning rate.
        For those who have measured it elsewhere: `update` does so here."""
        lr = self._optimizers.step(ratio, factor)
        self._model.spread()
        return lr
