"""Loss on held-out shards: the same windows in the same order whatever the layout, so that two numbers compare.

Each set of `data.eval` has a loss of its own, a mean over its targets; the loss of the evaluation is their mean by the
weights that the run file gives the sets, however large they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.data.windows import Batch, Windows
from shoal.errors import DataError
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run

if TYPE_CHECKING:
    from shoal.train.training import Tell  # whose hooks ask when


def evaluates_at(run: Run, step: int) -> bool:
    """Whether the model is evaluated after so many steps: every so many, and after the last."""
    measured = bool(run.data.eval or run.eval.tasks or run.eval.samples)
    return measured and (step == run.steps or (run.eval.every > 0 and step % run.eval.every == 0))


@dataclass(frozen=True)
class HeldOut:
    """What is measured, and what the sums say."""

    run: Run
    windows: Windows

    @cached_property
    def picked(self) -> list[np.ndarray]:
        """The windows of each set, by number."""
        sizes = self.windows.sizes
        counts = shared_out(sizes, [source.weight for source in self.run.data.eval], self.run.eval.windows)
        return [spread_over(size, count) for size, count in zip(sizes, counts, strict=True)]

    def batch(self, source: int, mine: np.ndarray) -> Batch:
        """The picked windows of a set by their places; beyond the last one they are filled up with windows whose
        targets are all masked."""
        ids = self.picked[source]
        real = mine < len(ids)
        pick = np.where(real, mine, 0)
        batch = self.windows.batch(np.full(len(pick), source), ids[pick])
        batch.targets[~real] = -100
        return batch

    def record(self, summed: Sequence[float], counted: Sequence[float], precision: str) -> dict[str, Any]:
        """For the journal: of each set the loss summed over its targets, and how many there are."""
        sets = self.run.data.eval
        if 0.0 in counted:
            raise DataError(
                f"data.eval {sets[counted.index(0.0)].path} has no target token: its loss mask hides every one, so "
                "its loss is not defined; leave it out."
            )
        losses = [float(total / n) for total, n in zip(summed, counted, strict=True)]
        each = zip(names_of([source.path for source in sets]), sets, losses, counted, strict=True)
        told = [{"name": name, "weight": s.weight, "loss": loss, "targets": int(n)} for name, s, loss, n in each]
        return {
            "loss": weighted_mean(losses, [source.weight for source in sets]),
            "targets": int(sum(counted)),
            "precision": precision,
            **({"sets": told} if len(sets) > 1 else {}),
        }


@dataclass(frozen=True)
class Evaluator:
    run: Run
    place: Place
    model: Laid
    windows: Windows
    tell: Tell

    def __call__(self, step: int) -> float:
        begin, picked = round(time.time(), 6), self._held_out.picked
        totals = torch.zeros(len(picked), dtype=torch.float64, device=self.place.device)
        targets = [0] * len(picked)
        for k, ids in enumerate(picked):
            for batches in self._rounds(k, ids):
                totals[k] += self.model.loss(batches).double()
                targets[k] += sum(self.model.count(batch) for batch in batches)
        summed, counted = self.model.total(totals).tolist(), self.place.sum_of_batch(*targets)
        record = self._held_out.record(summed, counted, self.run.eval.precision)
        self.tell("eval", step=step, begin=begin, **record)
        return float(record["loss"])

    @cached_property
    def _held_out(self) -> HeldOut:
        return HeldOut(self.run, self.windows)

    def _rounds(self, source: int, ids: np.ndarray) -> Iterator[list[Batch]]:
        """This process's share, in rounds of as many micro-batches as the model takes at once. Every process runs it
        equally often, for its collectives must meet: where the windows do not divide, the last round is filled up."""
        micro, at_once = int(self.run.mesh.micro_batch), self.model.at_once
        readers, reader = self.place.sizes.dp, self.place.at["dp"]
        for i in range(-(-len(ids) // (micro * at_once * readers))):
            first = (i * readers + reader) * at_once
            yield [self._held_out.batch(source, (first + j) * micro + np.arange(micro)) for j in range(at_once)]


def weighted_mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    if len(losses) == 1:
        return losses[0]
    return math.fsum(loss * w for loss, w in zip(losses, weights, strict=True)) / math.fsum(weights)


def shared_out(sizes: Sequence[int], weights: Sequence[float], limit: int | None) -> list[int]:
    """How many windows of each set: all of them, or `limit` by the sets' weights. One at least: a set without a loss
    would leave the mean without its share."""
    if limit is None or limit >= sum(sizes):
        return list(sizes)
    counts = [0] * len(sizes)
    left = limit
    while left > 0:  # what a small set has no room for goes to the others
        room = [k for k, size in enumerate(sizes) if counts[k] < size]
        whole = math.fsum(weights[k] for k in room)
        given = {k: min(sizes[k] - counts[k], int(left * weights[k] / whole)) for k in room}
        if not any(given.values()):  # fewer than there are sets: to those that are furthest behind
            given = dict.fromkeys(sorted(room, key=lambda k: (counts[k] / weights[k], k))[:left], 1)
        for k, n in given.items():
            counts[k] += n
        left = limit - sum(counts)
    return [max(1, n) for n in counts]


def spread_over(size: int, count: int) -> np.ndarray:
    """So many windows from the whole of a set, not from its beginning."""
    return np.arange(size) if count >= size else np.linspace(0, size - 1, count).astype(np.int64)


def all_windows(windows: Windows, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(sources, windows) of some data sets together, spread evenly over all of them."""
    sizes = windows.sizes
    sources = np.repeat(np.arange(len(sizes)), sizes)
    ids = np.concatenate([np.arange(n) for n in sizes])
    picked = spread_over(len(ids), len(ids) if limit is None else limit)
    return sources[picked].astype(np.int64), ids[picked].astype(np.int64)


def names_of(paths: Sequence[str]) -> list[str]:
    """The end of each path, as short as tells them apart."""
    parts = [path.rstrip("/").split("/") for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return list(paths)  # one data set twice
