"""Sampled replay, to catch a device that computes wrongly and says nothing.

Every so many steps the samples of one data-parallel rank are computed by it and by the next one, from the same weights
and the same seed: loss and gradient norm must agree. All ranks take part, as FSDP needs them, with the same tokens;
only the one whose turn it is has targets, so that what comes out of all sums is its work alone, to the last bit. It
works on every mesh for the same reason. On disagreement a third computation tells who is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.data.feed import Feed
from shoal.data.skips import Skips
from shoal.data.windows import NO_TARGET, Batch
from shoal.errors import TransientError
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train.balance import forget
from shoal.train.optim import Optimizers
from shoal.train.poison import Poison
from shoal.train.seed import seed_step

# A GPU's kernels add up in any order; a CPU's do not.
TOLERANCE = {"cpu": 0.0, "cuda": 1e-2}
INNOCENT_WAIT_S = 5.0  # so that the supervisor sees the guilty one leave first, and names it


@dataclass(frozen=True)
class Result:
    """What a data-parallel rank has computed."""

    by: int
    loss: float
    norm: float

    def agrees(self, other: Result, tolerance: float) -> bool:
        pairs = ((self.loss, other.loss), (self.norm, other.norm))
        return all(a == b or abs(a - b) <= tolerance * abs(b) for a, b in pairs)


def guilty(results: Sequence[Result], tolerance: float) -> list[int]:
    """Who is wrong, of those whose first two results differ; several where that cannot be told."""
    wrong = {r.by for r in results if sum(r.agrees(other, tolerance) for other in results) < len(results) / 2}
    by = {r.by: [one for one in results if one.by == r.by] for r in results}
    unsteady = {who for who, mine in by.items() if not mine[0].agrees(mine[-1], tolerance)}
    return sorted(unsteady or wrong or by)


@dataclass
class Replay:
    run: Run
    place: Place
    model: Laid
    optimizers: Optimizers
    feed: Feed
    skips: Skips
    tell: Callable[..., None]
    poison: Poison
    agreed: int = 0  # the step at which all was well last

    def __call__(self, done: int) -> None:
        """After `done` steps, if it is due. Collective; raises on all ranks when one of them is wrong."""
        every, readers = self.run.guard.replay, self.place.sizes.dp
        if not every or done % every:
            return
        begin, tolerance = round(time.time(), 6), TOLERANCE[self.place.device.type]
        owner = done // every % readers
        turns = [owner, (owner + 1) % readers]
        results = [self._compute(done, owner, by) for by in turns]
        if results[0].agrees(results[1], tolerance):
            self.agreed = done
            return
        more = [(owner + 2) % readers] if readers > 2 else turns
        results += [self._compute(done, owner, by) for by in more]
        self._accuse(done, begin, guilty(results, tolerance), results)

    def _compute(self, step: int, owner: int, by: int) -> Result:
        """The first samples of `owner` in the next step, computed by `by`; nothing of it stays."""
        batch = self.skips.batch_of(step)
        seed_step(self.run.seed, step, owner)
        batches = self._batches(batch, owner)
        if self.place.at["dp"] != by:
            batches = [replace(b, targets=np.full_like(b.targets, NO_TARGET)) for b in batches]
        with self.poison.computing(batch, self.model.decoders):
            loss = float(self.model.total(self.model.backward(batches)))
        norm = float(self.model.norm(1.0, None)[0])
        self.optimizers.forget()
        forget(self.model)
        return Result(by, loss, norm)

    def _batches(self, batch: int, owner: int) -> list[Batch]:
        feed = self.feed
        first = batch * feed.batch + owner * feed.share
        size = feed.micro_batch
        sources, windows = feed.order.pick(np.arange(first, first + size * self.model.at_once, dtype=np.uint64))
        return feed.windows.micro_batches(sources, windows, size)

    def _accuse(self, step: int, begin: float, wrong: list[int], results: list[Result]) -> None:
        ranks = [r for r in range(self.place.world) if self.place.sizes.coordinate(r)["dp"] in wrong]
        numbers = [{"dp_rank": r.by, "loss": r.loss, "grad_norm": r.norm} for r in results]
        fields = {"begin": begin, "rank": ranks[0], "ranks": ranks, "results": numbers, "agreed": self.agreed}
        self.tell("silent-corruption", step=step, batch=self.skips.batch_of(step), **fields)
        if self.place.rank not in ranks:
            time.sleep(INNOCENT_WAIT_S)
        named = (
            f"rank {ranks[0]} computes" if len(ranks) == 1 else f"one of ranks {', '.join(map(str, ranks))} computes"
        )
        shown = "; ".join(f"loss {r.loss:.9g} and gradient norm {r.norm:.9g} by reader {r.by}" for r in results)
        raise TransientError(
            f"silent corruption: {named} wrongly after step {step} ({shown}, of the same samples and weights): take "
            f"its machine out of service; checkpoints after step {self.agreed} may carry it."
        )
