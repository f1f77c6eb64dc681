"""The feed: hands a rank its micro-batches of any step, with the next step assembled while this one computes."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future

from shoal.data.order import Order
from shoal.data.windows import Batch, Windows
from shoal.errors import SpecError


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
        self.wait_s = 0.0
        """How long the last `step` had to wait for its data."""
        self._ahead: tuple[int, Future[list[Batch]]] | None = None
        self._jobs: queue.SimpleQueue[tuple[int, Future[list[Batch]]] | None] = queue.SimpleQueue()
        # A daemon: a download that hangs must not keep a process alive that wants to leave.
        self._thread = threading.Thread(target=self._work, name="shoal-feed", daemon=True)
        self._thread.start()

    def step(self, t: int) -> list[Batch]:
        """The micro-batches of this rank for step t (from 0). The next step is prepared in the background."""
        began = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] != t:
            ahead[1].cancel()  # a seek: do not spend time on what nobody asks for
            ahead = None
        future = ahead[1] if ahead else self._order_ahead(t)
        batches = future.result()
        self.wait_s = time.perf_counter() - began
        self._ahead = (t + 1, self._order_ahead(t + 1))
        return batches

    def assemble(self, t: int) -> list[Batch]:
        """What `step` returns, made here and now."""
        sources, windows = self.order.at(t * self.batch + self.rank * self.share, self.share)
        cuts = range(0, self.share, self.micro_batch)
        return [self.windows.batch(sources[i : i + self.micro_batch], windows[i : i + self.micro_batch]) for i in cuts]

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._jobs.put(None)
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order_ahead(self, t: int) -> Future[list[Batch]]:
        if not self._thread.is_alive():
            raise RuntimeError("this feed is closed")
        future: Future[list[Batch]] = Future()
        self._jobs.put((t, future))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            t, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self.assemble(t))
            except BaseException as e:
                future.set_exception(e)  # raised again by `step`, in the thread that can do something about it
