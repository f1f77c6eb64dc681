"""The feed of an island: the micro-batches of any shard of any batch, with the next batch's prepared meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.data.ahead import Ahead
from shoal.data.order import Order
from shoal.data.windows import AnyWindows, Batch


class ShardFeed:
    """Shard k of batch b is the samples [b·B + k·S, b·B + (k+1)·S); reader r of an island's R reads the r-th part."""

    def __init__(
        self,
        windows: AnyWindows,
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
        self._ahead: Ahead[tuple[int, int], list[Batch]] = Ahead(lambda key: self.assemble(*key), "shoal-shard-feed")
        self._counts: Ahead[int, tuple[int, int]] | None = None  # of a model that asks for them

    def get(self, number: int, shard: int) -> list[Batch]:
        return self._ahead.get((number, shard))

    def prepare(self, number: int, shards: Sequence[int]) -> None:
        """In the background. What was prepared for other batches, and not fetched, is forgotten."""
        self._ahead.want([(number, shard) for shard in shards])
        if self._counts is not None:
            self._counts.want([number])

    def count(self, number: int) -> tuple[int, int]:
        """Targets and tokens in this reader's part of every shard of a batch, whoever computes them. All of
        them are read for it; once it was asked for, the next batch is counted ahead too."""
        if self._counts is None:
            self._counts = Ahead(self._count, "shoal-shard-count")
        return self._counts.get(number)

    def _count(self, number: int) -> tuple[int, int]:
        batches = [b for shard in range(self._batch // self._shard) for b in self.assemble(number, shard)]
        return sum(b.target_count for b in batches), sum(b.token_count for b in batches)

    def assemble(self, number: int, shard: int) -> list[Batch]:
        first = number * self._batch + shard * self._shard + self._first
        sources, windows = self._order.pick(np.arange(first, first + self._share, dtype=np.uint64))
        return self._windows.micro_batches(sources, windows, self._micro_batch)

    def close(self) -> None:
        self._ahead.close()
        if self._counts is not None:
            self._counts.close()
