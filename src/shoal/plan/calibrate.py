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
        # The entry's bandwidth is that of a copy; what a step does with its memory is more like a norm.
        copied, normed = (max((rate for _, rate in rows), default=0.0) for rows in (seen.memory, seen.norm))
        c = replace(c, achieved=normed / copied if normed else 0.9)
    if seen.launch_us:
        c = replace(c, launch_s=seen.launch_us * 1e-6)
    return c


def _products(device: Device, c: Constants) -> Constants:
    """What products reach that are large in every direction, and what they lose to their shape: the three numbers that
    explain the measured ones best."""
    rows = [(m, n, k, rate * 1e12) for m, n, k, precision, rate in device.measured.matmul if precision == "bf16"]
    best = device.ceiling("bf16")
    if len(rows) < 3 or not best:
        return c
    m, n, k, rate = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    units = float(device.units or 100)

    def left(waves: float, depth: float) -> tuple[float, float]:
        lost: Column = 1 + waves * units * TILE / (m * n) + depth / k
        shares = np.log(rate * lost / (best * 1e12))
        middle = float(np.median(shares))
        return float(np.mean(np.abs(shares - middle))), float(np.exp(middle))

    tried = [(waves, depth) for waves in _steps("waves") for depth in _steps("depth")]
    waves, depth = min(tried, key=lambda pair: left(*pair)[0])
    return replace(c, waves=waves, depth=depth, sustained=left(waves, depth)[1], young=0.0)


def _steps(name: str) -> list[float]:
    low, high = bounds(name)
    return [float(x) for x in np.geomspace(low, high, 24)]


def _attention(device: Device, c: Constants) -> Constants:
    """Of the best product's speed, both directions together: 2 parts of the work forwards and 5 backwards."""
    best = device.ceiling("bf16")
    rows = [row for row in device.measured.attention if row[5] == "bf16" and row[3] >= 2048]
    if not rows or not best:
        return c
    share = median(7 / (2 / row[6] + 5 / row[7]) / best for row in rows) / c.sustained
    return replace(c, native=share, generic=share)
