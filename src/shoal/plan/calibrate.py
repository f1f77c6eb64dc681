"""The constants of one machine, from what `shoal bench` has measured there: nothing is learnt from a training run.

What a bench cannot see (how traffic hides behind work, what a step costs the host) stays as it was fitted to others'.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np

from shoal.plan.case import Column
from shoal.plan.catalogue import Device
from shoal.plan.constants import Constants, bounds, fitted
from shoal.plan.products import TILE


def calibrated(device: Device, c: Constants | None = None) -> Constants:
    """As fitted, where nothing was measured."""
    c = c or fitted()
    seen = device.measured
    if seen.matmul:
        c = _products(device, c)
    if seen.attention:
        c = _attention(device, c)
    if seen.memory:
        c = replace(c, achieved=1.0)  # the entry's bandwidth is what was measured
    if seen.launch_us:
        c = replace(c, launch_s=seen.launch_us * 1e-6)
    return c


def _products(device: Device, c: Constants) -> Constants:
    """How much a product loses to its shape: the two numbers that explain the measured ones best."""
    rows = [(m, n, k, rate * 1e12) for m, n, k, precision, rate in device.measured.matmul if precision == "bf16"]
    best = device.ceiling("bf16")
    if len(rows) < 3 or not best:
        return c
    m, n, k, rate = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    units = float(device.units or 100)

    def off(waves: float, depth: float) -> float:
        lost: Column = 1 + waves * units * TILE / (m * n) + depth / k
        return float(np.median(np.abs(np.log(best * 1e12 / lost / rate))))

    tried = [(waves, depth) for waves in _steps("waves") for depth in _steps("depth")]
    waves, depth = min(tried, key=lambda pair: off(*pair))
    return replace(c, waves=waves, depth=depth, sustained=1.0, young=0.0)


def _steps(name: str) -> list[float]:
    low, high = bounds(name)
    return [float(x) for x in np.geomspace(low, high, 24)]


def _attention(device: Device, c: Constants) -> Constants:
    """Of the best product's speed, both directions together: 2 parts of the work forwards and 5 backwards."""
    best = device.ceiling("bf16")
    rows = [row for row in device.measured.attention if row[5] == "bf16" and row[3] >= 2048]
    if not rows or not best:
        return c
    share = median(7 / (2 / row[6] + 5 / row[7]) / best for row in rows)
    return replace(c, native=share, generic=share)
