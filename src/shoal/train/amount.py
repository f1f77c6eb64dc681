"""How much a step has to do: what a process counts of its batches, and what follows from the sum over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.data.windows import Batch
from shoal.parallel.laid import Laid
from shoal.spec.flops import seen_pairs, step_flops
from shoal.spec.run import Run
from shoal.spec.shape import Shape


class Amount(NamedTuple):
    targets: float  # or what an own loss is divided by
    tokens: float  # without padding
    pairs: float  # of a token and one that it sees, over all layers

    @property
    def token_weight(self) -> float:
        """Targets for each token, by which routers weigh losses of their own (`shoal.model.moe`)."""
        return self.targets / max(1.0, self.tokens)


def amount(model: Laid, batches: Sequence[Batch]) -> Amount:
    """What these batches have."""
    return Amount(
        sum(model.count(b) for b in batches),
        sum(b.token_count for b in batches),
        sum(seen_pairs(model.shape, b.lengths) for b in batches),
    )


def read_fields(run: Run, shape: Shape, batch: int, known: Amount) -> dict[str, float]:
    """For the record of a step that has read this batch of the order, with so much in it, of all processes."""
    read = {"position": batch * run.train.batch, "samples": run.train.batch}
    read |= {"tokens": int(known.tokens), "targets": int(known.targets)}
    return {**read, **flops_fields(run, shape, known.tokens, known.pairs)}


def flops_fields(run: Run, shape: Shape, tokens: float, pairs: float) -> dict[str, float]:
    """For the record of a step on so many tokens, of all processes. Nothing where own code computes it."""
    if run.own.computes or run.foreign:
        return {}
    counted = step_flops(shape, tokens, pairs, str(run.mesh.recompute))
    return {"flops": counted.model, "hardware_flops": counted.hardware}
