"""The feed of an island: the micro-batches of any shard of any batch, with the next batch's prepared meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from shoal.data.order import Order
from shoal.data.windows import Batch, Windows


class ShardFeed:
    """Shard k of batch b is the samples [b·B + k·S, b·B + (k+1)·S); reader r of an island's R reads the r-th part."""

    def __init__(
        self,
        windows: Windows,
        order: Order,
        batch: int,
        shard: int,
        reader: int,
        readers: int,
        micro_batch: int,
    ) -> None:
        self._windows, self._order = windows, order
        self._batch, self._shard, self._micro_batch = batch, shard, micro_batch
        self._share = shard // readers
        self._first = reader * self._share
        self._thread = ThreadPoolExecutor(1, "shoal-shard-feed")
        self._ahead: dict[tuple[int, int], Future[list[Batch]]] = {}
        self._counting: tuple[int, Future[tuple[int, int]]] | None = None

    def get(self, number: int, shard: int) -> list[Batch]:
        made = self._ahead.pop((number, shard), None)
        return self.assemble(number, shard) if made is None else made.result()

    def prepare(self, number: int, shards: Iterable[int]) -> None:
        """In the background. What was prepared for other batches, and not fetched, is forgotten."""
        self._ahead = {key: made for key, made in self._ahead.items() if key[0] == number}
        for shard in shards:
            if (number, shard) not in self._ahead:
                self._ahead[number, shard] = self._thread.submit(self.assemble, number, shard)
        if self._counting is not None:
            self._count_of(number)

    def count(self, number: int) -> tuple[int, int]:
        """Targets and tokens in this reader's part of every shard of a batch, whoever computes them. All of
        them are read for it; once it was asked for, the next batch is counted ahead too."""
        return self._count_of(number).result()

    def _count_of(self, number: int) -> Future[tuple[int, int]]:
        if self._counting is None or self._counting[0] != number:
            self._counting = number, self._thread.submit(self._count, number)
        return self._counting[1]

    def _count(self, number: int) -> tuple[int, int]:
        batches = [b for shard in range(self._batch // self._shard) for b in self.assemble(number, shard)]
        return sum(b.target_count for b in batches), sum(b.token_count for b in batches)

    def assemble(self, number: int, shard: int) -> list[Batch]:
        first = number * self._batch + shard * self._shard + self._first
        sources, windows = self._order.pick(np.arange(first, first + self._share, dtype=np.uint64))
        cuts = range(0, self._share, self._micro_batch)
        return [
            self._windows.batch(sources[i : i + self._micro_batch], windows[i : i + self._micro_batch]) for i in cuts
        ]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
