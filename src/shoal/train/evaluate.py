"""Loss on held-out shards: the same windows in the same order whatever the layout, so that two numbers compare."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from shoal.data.windows import Batch, Windows
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train.training import Tell


@dataclass(frozen=True)
class Evaluator:
    run: Run
    place: Place
    model: Laid
    windows: Windows
    tell: Tell

    def __call__(self, step: int) -> float:
        begin = round(time.time(), 6)
        total, targets = torch.zeros((), dtype=torch.float64, device=self.place.device), 0
        for batches in self._rounds():
            total += self.model.loss(batches).double()
            targets += sum(batch.target_count for batch in batches)
        loss = float(self.model.total(total))
        (all_targets,) = self.place.sum_of_batch(targets)
        self.tell("eval", step=step, begin=begin, loss=loss / all_targets, targets=int(all_targets))
        return loss / all_targets

    def _rounds(self) -> Iterator[list[Batch]]:
        """This process's share, in rounds of as many micro-batches as the model takes at once. Every process runs it
        equally often, for its collectives must meet: where the windows do not divide, the last round is filled up with
        windows whose targets are all masked."""
        sources, ids = all_windows(self.windows, self.run.eval.windows)
        micro, at_once = int(self.run.mesh.micro_batch), self.model.at_once
        readers, reader = self.place.sizes.dp, self.place.at["dp"]
        for i in range(-(-len(ids) // (micro * at_once * readers))):
            first = (i * readers + reader) * at_once
            yield [self._batch(sources, ids, (first + j) * micro + np.arange(micro)) for j in range(at_once)]

    def _batch(self, sources: np.ndarray, ids: np.ndarray, mine: np.ndarray) -> Batch:
        real = mine < len(ids)
        pick = np.where(real, mine, 0)
        batch = self.windows.batch(sources[pick], ids[pick])
        batch.targets[~real] = -100
        return batch


def all_windows(windows: Windows, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    sizes = windows.sizes
    sources = np.repeat(np.arange(len(sizes)), sizes)
    ids = np.concatenate([np.arange(n) for n in sizes])
    if limit is not None and limit < len(ids):
        spread = np.linspace(0, len(ids) - 1, limit).astype(np.int64)  # from the whole set, not its beginning
        sources, ids = sources[spread], ids[spread]
    return sources.astype(np.int64), ids.astype(np.int64)
