"""The feed: hands a rank its micro-batches of any step, with the next steps assembled while this one computes."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np

from shoal.data.order import I64, Order
from shoal.data.windows import Batch, Windows
from shoal.errors import SpecError

# More than one, so that a slow download or a busy core now and then is not felt, and threads need not take turns.
STEPS_AHEAD = 4
PLANNED_STEPS = 16


class Feed:
    """Rank r of W owns positions [t·B + r·B/W, t·B + (r+1)·B/W) of step t. It keeps no place: to seek is to ask."""

    def __init__(
        self, windows: Windows, order: Order, batch: int, rank: int = 0, world: int = 1, micro_batch: int | None = None
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
        # Steps are asked for in rounds of t, t + 1, …; a seek starts a new round, and what an old one made is dropped.
        self._round = 0
        self._asked = 0  # the next step to ask the thread for
        self._next: int | None = None  # the step that the thread hands over next
        self._kept: tuple[int, list[Batch]] | None = None  # the step that was looked at ahead
        self._jobs: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[int, list[Batch] | BaseException]] = queue.SimpleQueue()
        # A daemon: a download that hangs must not keep a process alive that wants to leave.
        self._thread = threading.Thread(target=self._work, name="shoal-feed", daemon=True)
        self._thread.start()

    def step(self, t: int) -> list[Batch]:
        """The micro-batches of this rank for step t (from 0). The steps after it are prepared in the background."""
        began = time.perf_counter()
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == t:
            self.wait_s = 0.0
            return kept[1]
        if self._next != t:  # a seek, or the first call: what was asked for before is of no use
            self._round += 1
            self._asked = t
        self._next = None
        self._ask_up_to(t + STEPS_AHEAD)
        while True:
            round, made = self._made.get()
            if round == self._round:
                break
        self.wait_s = time.perf_counter() - began
        if isinstance(made, BaseException):
            raise made
        self._next = t + 1
        return made

    def look_ahead(self, t: int) -> list[Batch]:
        """What `step(t)` will return, if it is the next that is asked for."""
        made = self.step(t)
        self._kept = t, made
        return made

    def assemble(self, t: int) -> list[Batch]:
        """What `step` returns, made here and now."""
        sources, windows = self.samples(t)
        cuts = range(0, self.share, self.micro_batch)
        return [self.windows.batch(sources[i : i + self.micro_batch], windows[i : i + self.micro_batch]) for i in cuts]

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
        self._round += 1
        self._jobs.put(None)
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask_up_to(self, last: int) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("this feed is closed")
        while self._asked <= last:
            self._jobs.put((self._round, self._asked))
            self._asked += 1

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            round, t = job
            if round != self._round:
                continue  # nobody waits for it any more
            made: list[Batch] | BaseException
            try:
                made = self.assemble(t)
            except BaseException as e:
                made = e  # raised by `step`, in the thread that can do something about it
            self._made.put((round, made))
