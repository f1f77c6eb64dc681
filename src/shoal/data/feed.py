"""The feed: hands a rank its micro-batches of any step, with the next steps assembled while this one computes."""

from __future__ import annotations

import time

import numpy as np

from shoal.data.ahead import Ahead
from shoal.data.order import I64, Order
from shoal.data.windows import AnyWindows, Batch
from shoal.errors import SpecError

# More than one, so that a slow download or a busy core now and then is not felt, and threads need not take turns.
STEPS_AHEAD = 4
PLANNED_STEPS = 16


class Feed:
    """Rank r of W owns positions [t·B + r·B/W, t·B + (r+1)·B/W) of step t. It keeps no place: to seek is to ask."""

    def __init__(
        self,
        windows: AnyWindows,
        order: Order,
        batch: int,
        rank: int = 0,
        world: int = 1,
        micro_batch: int | None = None,
    ) -> None:
        if batch % world:
            raise SpecError(
                f"train.batch {batch} cannot be shared equally by {world} processes; "
                f"take {max(batch // world, 1) * world} or {(batch // world + 1) * world}."
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        if order.sizes != windows.sizes:
            raise ValueError(f"the order is over {order.sizes} windows and the data has {windows.sizes}")
        self.windows, self.order = windows, order
        self.batch, self.rank, self.world = batch, rank, world
        self.share = batch // world
        self.micro_batch = min(micro_batch or self.share, self.share)
        self._planned: tuple[int, I64, I64] = (0, np.empty((0, 0), np.int64), np.empty((0, 0), np.int64))
        self.wait_s = 0.0
        """How long the last `step` had to wait for its data."""
        self._kept: tuple[int, list[Batch]] | None = None  # the step that was looked at ahead
        self._ahead: Ahead[int, list[Batch]] = Ahead(lambda t: self.assemble(t))

    def step(self, t: int) -> list[Batch]:
        """The micro-batches of this rank for step t (from 0). The steps after it are prepared in the background."""
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == t:
            self.wait_s = 0.0
            return kept[1]
        began = time.perf_counter()
        self._ahead.want(range(t, t + 1 + STEPS_AHEAD))
        made = self._ahead.get(t)
        self.wait_s = time.perf_counter() - began
        return made

    def look_ahead(self, t: int) -> list[Batch]:
        """What `step(t)` will return, if it is the next that is asked for."""
        made = self.step(t)
        self._kept = t, made
        return made

    def assemble(self, t: int) -> list[Batch]:
        """What `step` returns, made here and now."""
        return self.windows.micro_batches(*self.samples(t), self.micro_batch)

    def samples(self, t: int) -> tuple[I64, I64]:
        """This rank's part of the order in step t, looked up for some steps at once: one call costs as much as many."""
        first, sources, windows = self._planned
        if not first <= t < first + len(sources):
            steps = np.arange(t, t + PLANNED_STEPS, dtype=np.uint64)[:, None] * np.uint64(self.batch)
            mine = np.arange(self.rank * self.share, (self.rank + 1) * self.share, dtype=np.uint64)
            sources, windows = (a.reshape(PLANNED_STEPS, -1) for a in self.order.pick((steps + mine).reshape(-1)))
            self._planned = first, sources, windows = t, sources, windows
        return sources[t - first], windows[t - first]

    def close(self) -> None:
        self._ahead.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
