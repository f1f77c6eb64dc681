"""Held-out data in a model cut over peers: its micro-batches by number, and what their losses add up to.

What is measured and what is told is that of every driver (`shoal.train.evaluate`). Losses are added in the order of the
micro-batches, so that the sum is that of one process, whoever computed them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from shoal.data.windows import Batch, Windows
from shoal.spec.run import Run
from shoal.stages.report import Measured
from shoal.stages.routes import Sums
from shoal.train.evaluate import HeldOut
from shoal.train.state import State
from shoal.train.training import Tell


class StageHeldOut:
    def __init__(self, run: Run, windows: Windows, rows: int, precision: str, state: State, tell: Tell) -> None:
        self._held_out, self._rows, self._precision = HeldOut(run, windows), rows, precision
        self._state, self._tell = state, tell
        self._ends = list(accumulate(-(-len(ids) // rows) for ids in self._held_out.picked))  # of each set's
        self._begin: float | None = None

    @property
    def count(self) -> int:
        """Micro-batches."""
        return self._ends[-1]

    def batch(self, m: int) -> Batch:
        if self._begin is None:
            self._begin = round(time.time(), 6)
        source = self._set_of(m)
        first = m - (self._ends[source - 1] if source else 0)
        return self._held_out.batch(source, first * self._rows + np.arange(self._rows))

    def add_up(self, sums: Sums | None, step: int, measured: Sequence[Measured]) -> Sums:
        losses, targets = [0.0] * len(self._ends), [0] * len(self._ends)
        if sums is not None:
            losses, targets = list(sums.losses), list(sums.targets)
        for m, loss, count in measured:
            losses[self._set_of(m)] += loss
            targets[self._set_of(m)] += count
        if measured and measured[-1][0] == self.count - 1:  # what is wrong with the data is found by the lead
            self._held_out.record(losses, targets, self._precision)
        return Sums(step, tuple(losses), tuple(targets))

    def tell(self, sums: Sums) -> None:
        if 0 in sums.targets:
            return  # of a lead that has other data
        record = self._held_out.record(sums.losses, sums.targets, self._precision)
        begin, self._begin = self._begin or round(time.time(), 6), None
        self._state.measured(sums.step, float(record["loss"]))
        self._tell("eval", step=sums.step, begin=begin, **record)

    def _set_of(self, m: int) -> int:
        return next(k for k, end in enumerate(self._ends) if m < end)
