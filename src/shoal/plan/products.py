"""How long a linear layer takes: products of matrices by their shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.plan.case import Cases, Column
from shoal.plan.constants import Constants

TILE = 128 * 128


@dataclass(frozen=True)
class Time:
    """Seconds of a micro-batch in one layer, forwards and backwards."""

    forward: Column
    backward: Column

    def __add__(self, other: Time) -> Time:
        return Time(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: Column | float) -> Time:
        return Time(self.forward * factor, self.backward * factor)

    @property
    def both(self) -> Column:
        return self.forward + self.backward


def speed(cases: Cases, c: Constants, low: bool) -> Column:
    """FLOP/s of a product that is large in every direction."""
    grown = 1 - c.young * np.exp2(-cases.age)
    if not low:
        return cases.matmul * c.sustained * grown
    return cases.matmul_low * c.sustained * grown * np.where(cases.low == 2, c.blocks, 1.0)


def linear(
    cases: Cases, c: Constants, rows: Column, out: Column, inside: Column, low: bool = True, cast: bool = True
) -> Time:
    """Of `rows` tokens from width `inside` to width `out`: one product forwards; backwards one for the input's
    gradient and one for the weight's. `low`: in the run's own precision, not in 16 bits; `cast`: with what it takes to
    make numbers narrow."""
    at = speed(cases, c, low)
    forward = _product(cases, c, rows, out, inside, at)
    backward = _product(cases, c, rows, inside, out, at) + _product(cases, c, inside, out, rows, at)
    if not (low and cast):
        return Time(forward, backward)
    made = (
        np.where(np.isnan(cases.cast_moved), c.cast, cases.cast_moved)
        * (rows * inside + rows * out + inside * out / 2)
        / (cases.bandwidth * c.achieved)
    )
    made = np.where(cases.low > 0, made, 0.0)
    return Time(forward + made / 3, backward + made * 2 / 3)


def _product(cases: Cases, c: Constants, m: Column, n: Column, k: Column, at: Column) -> Column:
    """m x k times k x n. A product pays for the last wave of tiles, which fills some of the units only, and for the
    beginning and the end of every tile; a thin one moves bytes."""
    last_wave = c.waves * cases.units * TILE / np.maximum(m * n, 1.0)
    ends = c.depth / np.maximum(k, 1.0)
    computed = 2 * m * n * k / at * (1 + last_wave + ends)
    moved = cases.wide * (m * n + n * k + m * k) / (cases.bandwidth * c.achieved)
    return np.maximum(computed, moved) + c.launch_s
