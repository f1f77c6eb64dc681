"""Loss on held-out shards: the same windows in the same order whatever the layout, so that two numbers compare."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from shoal.data.windows import Batch, Windows
from shoal.parallel.place import Place
from shoal.parallel.shard import precision, reshard
from shoal.spec.run import Run
from shoal.train.loop import Tell, loss_sum


@dataclass(frozen=True)
class Evaluator:
    run: Run
    place: Place
    model: nn.Module
    windows: Windows
    tell: Tell

    def __call__(self, step: int) -> float:
        begin = round(time.time(), 6)
        total, targets = torch.zeros((), dtype=torch.float64, device=self.place.device), 0
        self.model.eval()
        with torch.no_grad(), precision(self.run, self.model, self.place):
            for batch in self._batches():
                total += loss_sum(self.model, batch, self.place.device).double()
                targets += batch.target_count
        reshard(self.model)
        self.model.train()
        loss, all_targets = self.place.sum(float(total), targets)
        self.tell("eval", step=step, begin=begin, loss=loss / all_targets, targets=int(all_targets))
        return loss / all_targets

    def _batches(self) -> Iterator[Batch]:
        """This process's share. Every process runs the model equally often, for its collectives must meet: where the
        windows do not divide, the last batch is filled up with windows whose targets are all masked."""
        sources, ids = _all_windows(self.windows, self.run.eval.windows)
        micro, world = int(self.run.mesh.micro_batch), self.place.world
        rounds = -(-len(ids) // (micro * world))
        for i in range(rounds):
            mine = (i * world + self.place.rank) * micro + np.arange(micro)
            real = mine < len(ids)
            pick = np.where(real, mine, 0)
            batch = self.windows.batch(sources[pick], ids[pick])
            batch.targets[~real] = -100
            yield batch


def _all_windows(windows: Windows, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    sizes = windows.sizes
    sources = np.repeat(np.arange(len(sizes)), sizes)
    ids = np.concatenate([np.arange(n) for n in sizes])
    if limit is not None and limit < len(ids):
        spread = np.linspace(0, len(ids) - 1, limit).astype(np.int64)  # from the whole set, not its beginning
        sources, ids = sources[spread], ids[spread]
    return sources.astype(np.int64), ids.astype(np.int64)
