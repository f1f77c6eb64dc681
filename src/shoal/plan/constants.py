"""The few numbers of the cost model that no datasheet states, each with what was expected of it beforehand.

They are fitted to published runs (benchmarks/planner.py) and kept near what is expected: a number that the runs say
nothing about stays where physics and other people's measurements put it. None belongs to a machine or to a source.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any


def _expected(value: float, low: float, high: float) -> Any:
    return field(default=value, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class Constants:
    # Products of matrices.
    sustained: float = _expected(0.93, 0.7, 1.05)  # of the best product, in a step: clocks sag when all units are busy
    waves: float = _expected(1.0, 0.1, 5.0)  # partly filled waves a product, in tiles of 128 x 128 on every unit
    depth: float = _expected(64.0, 5.0, 500.0)  # inner size whose cost is a product's beginning and end
    launch_s: float = _expected(3e-6, 5e-7, 2e-5)  # between two kernels
    young: float = _expected(0.2, 0.02, 0.5)  # lost on an architecture in its first year; halves every year
    cast: float = _expected(2.0, 0.1, 12.0)  # bytes moved for each number that is made narrow
    blocks: float = _expected(0.95, 0.7, 1.0)  # of fp8's speed with a scale every 32 numbers
    # Attention: of the speed of products.
    native: float = _expected(0.5, 0.3, 0.8)  # kernels made for the device, forwards and backwards together
    generic: float = _expected(0.3, 0.15, 0.6)  # kernels made for an older one
    score: float = _expected(14.0, 5.0, 40.0)  # bytes a score when they go through memory
    # What moves bytes.
    achieved: float = _expected(0.8, 0.6, 0.95)  # of the memory's bandwidth
    stream: float = _expected(16.0, 6.0, 60.0)  # passes over the residual stream a layer: norms, sums, rotations
    inner: float = _expected(12.0, 4.0, 40.0)  # passes over the feed-forward's width
    unfused: float = _expected(1.2, 1.0, 3.0)  # more of both, where each operation is a kernel
    logit: float = _expected(14.0, 4.0, 40.0)  # bytes a logit of the loss
    update: float = _expected(24.0, 12.0, 48.0)  # bytes a parameter of the optimizer's step
    # Communication.
    links: float = _expected(0.9, 0.5, 1.1)  # of what a link reaches with nothing else to do
    nics: float = _expected(0.9, 0.5, 1.1)  # and a network card
    start_s: float = _expected(1.5e-5, 3e-6, 6e-5)  # a collective's start
    hops: float = _expected(1.0, 0.3, 3.0)  # of a hop's latency, for each member of a ring
    beside_tp: float = _expected(0.7, 0.2, 0.95)  # of tensor parallelism's traffic, hidden where products overlap it
    beside_dp: float = _expected(0.9, 0.5, 1.0)  # of the work that data parallelism's traffic may hide behind
    felt: float = _expected(0.3, 0.05, 0.8)  # of it when it is hidden, on GPUs: it takes units from that work
    handover: float = _expected(0.4, 0.05, 1.5)  # of what a pipeline hands on, seen
    exchange: float = _expected(0.6, 0.2, 0.9)  # of a link's share, in an exchange of all with all
    # Experts.
    uneven: float = _expected(
        1.15, 1.0, 2.0
    )  # the fullest expert against the mean, and smaller products than they seem
    permute: float = _expected(8.0, 3.0, 30.0)  # passes over the routed tokens
    beside_ep: float = _expected(0.3, 0.05, 0.8)  # of the exchange, hidden
    # A step.
    host_s: float = _expected(0.015, 0.001, 0.06)  # what a step costs whatever it computes
    waiting: float = _expected(0.003, 0.0002, 0.02)  # more, for each doubling of the nodes: the slowest sets the pace


@cache
def _file() -> dict[str, dict[str, float]]:
    return tomllib.loads(resources.files("shoal.plan").joinpath("constants.toml").read_text())


@cache
def fitted() -> Constants:
    """As benchmarks/planner.py fitted them."""
    return Constants(**_file()["constants"])


def spread() -> tuple[float, float]:
    """Of a predicted speed, what was measured in four of five runs whose source the constants had not seen."""
    return _file()["spread"]["low"], _file()["spread"]["high"]


def names() -> list[str]:
    return [f.name for f in fields(Constants)]


def bounds(name: str) -> tuple[float, float]:
    meta = Constants.__dataclass_fields__[name].metadata
    return float(meta["low"]), float(meta["high"])
