"""Windows on which others' parts are tried: held out, or of the training data but never trained on.

A part that has learned windows by heart would look good on them. Where all of the training data is read and none is
held out there are no such windows, and nothing is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.data.order import I64, Order
from shoal.data.windows import AnyWindows

MOST_WINDOWS = 1 << 30  # of a pool: a larger one is no better


@dataclass(frozen=True)
class Pool:
    """Windows by number, from 0 to `size`."""

    windows: AnyWindows
    size: int
    order: Order | None = None  # of the training data; None: the windows are held out, and all of them are in it
    first: int = 0  # position in the order

    @classmethod
    def of(cls, windows: AnyWindows, order: Order, trained: int, held_out: AnyWindows | None) -> Pool:
        """`trained`: samples of the order that the whole swarm trains on."""
        if held_out is not None:
            return cls(held_out, min(sum(held_out.sizes), MOST_WINDOWS))
        return cls(windows, max(0, min(first_epoch(order) - trained, MOST_WINDOWS)), order, trained)

    def pick(self, numbers: Sequence[int]) -> tuple[I64, I64]:
        """Their sources and windows."""
        at = np.asarray(numbers, np.int64)
        if self.order is not None:
            return self.order.pick((at + self.first).astype(np.uint64))
        sizes = np.asarray(self.windows.sizes, np.int64)
        ends = np.cumsum(sizes)
        source = ends.searchsorted(at, side="right").astype(np.int64)
        return source, at - (ends - sizes)[source]


def first_epoch(order: Order) -> int:
    """So many positions hold no window twice, whatever the mixture: every source is still in its first epoch."""
    if len(order.sizes) == 1:
        return order.sizes[0]
    blocks = min(size // count for size, count in zip(order.sizes, order.quotas.counts, strict=True))
    return blocks * order.quotas.block
