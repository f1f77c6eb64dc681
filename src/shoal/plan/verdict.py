"""What a layout means to whoever pays for it: speed, utilisation, money, energy, goodput, days, as intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import SetupError
from shoal.plan.asked import Asked
from shoal.plan.catalogue import Device, price
from shoal.plan.constants import spread
from shoal.plan.failures import FailureRate
from shoal.plan.goodput import Goodput, goodput
from shoal.plan.restarts import Style
from shoal.plan.search import Found

# Float32 weights and AdamW's two moments: what a checkpoint holds of a parameter.
SAVED_BYTES = 12
# Bytes a second that one node writes to its disk or to a bucket, where nobody has measured it (claims.md: 2.3 GB/s).
NODE_WRITES = 2e9
# To storage that all nodes share, together (the 405B checkpoint of restarts.py; an assumption).
STORAGE_WRITES = 40e9
# What a save in the background holds training up (claims.md: 0.06 s of 14.8 GB on one H200).
BLOCKING_S = 0.1
# Less of the time than this is none.
NO_GOODPUT = 1e-3
DAY_S, HOUR_S = 86400.0, 3600.0


@dataclass(frozen=True)
class Range:
    low: float
    expected: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.expected * factor, self.high * factor)

    def inverse(self) -> Range:
        return Range(1 / self.high, 1 / self.expected, 1 / self.low)

    def by(self, other: Range) -> Range:
        """The product with one that is wrong for other reasons: as shares, what they are off by adds up by squares."""
        expected = self.expected * other.expected
        down = math.hypot(*(math.log(r.expected / r.low) for r in (self, other)))
        up = math.hypot(*(math.log(r.high / r.expected) for r in (self, other)))
        return Range(expected * math.exp(-down), expected, expected * math.exp(up))


@dataclass(frozen=True)
class Verdict:
    found: Found
    tokens_s: Range  # of all devices, without failures
    mfu: float  # attention counted as far as a token sees
    mfu_whole: float  # and the whole square of a window
    goodput: Goodput
    tokens: float  # of the whole run
    usd_per_hour: float | None  # of all devices
    watts: float | None

    @property
    def useful_tokens_s(self) -> Range:
        """With failures."""
        good = self.goodput
        return self.tokens_s.by(Range(max(good.low, NO_GOODPUT), good.expected, good.high))

    @property
    def days(self) -> Range:
        return self.useful_tokens_s.inverse().times(self.tokens / DAY_S)

    @property
    def usd(self) -> Range | None:
        return None if self.usd_per_hour is None else self.days.times(24 * self.usd_per_hour)

    @property
    def usd_per_billion(self) -> Range | None:
        """Tokens, with failures."""
        return None if self.usd_per_hour is None else self._hours_per_billion.times(self.usd_per_hour)

    @property
    def kwh_per_billion(self) -> Range | None:
        return None if self.watts is None else self._hours_per_billion.times(self.watts / 1000)

    @property
    def _hours_per_billion(self) -> Range:
        return self.useful_tokens_s.inverse().times(1e9 / HOUR_S)


def save_s(params: float, nodes: int, far: bool = False) -> float:
    """From the moment that training stops for a save until it is safe, near its nodes or `far` from them."""
    rate = nodes * NODE_WRITES
    return SAVED_BYTES * params / (min(rate, STORAGE_WRITES) if far else rate)


def verdict(asked: Asked, device: Device, found: Found, rates: FailureRate, how: Style, usd: float | None) -> Verdict:
    """`usd`: an hour of one device; empty: the catalogue's newest price."""
    run, devices = asked.run, asked.devices
    tokens = run.train.batch * run.data.seq_len
    low, high = spread()
    expected = tokens / found.seconds
    per_node = min(asked.island, asked.machine.node)
    writes = save_s(asked.shape.params, math.ceil(asked.island / per_node))  # of islands one saves for all
    good = goodput(devices, per_node, rates, how, writes, min(BLOCKING_S, writes), step_s=found.seconds)
    if good.expected < NO_GOODPUT:
        raise SetupError(
            f"{devices:,} devices fail so often that with the style '{how.name}' the run never gets anywhere; "
            "take another --style, or fewer devices."
        )
    known = price(device) if usd is None else None
    each = usd if usd is not None else None if known is None else known.usd_per_hour
    needed = asked.shape.flops_per_token_seeing(asked.seen.seen)
    square = asked.shape.flops_per_token(run.data.seq_len, causal=False)
    peak, whole = asked.peak * devices, devices / asked.machine.processes
    return Verdict(
        found,
        Range(expected * low, expected, expected * high),
        mfu=needed * expected / peak,
        mfu_whole=square * expected / peak,
        goodput=good,
        tokens=tokens * run.steps,
        usd_per_hour=None if each is None else each * whole,
        watts=None if not device.watts else device.watts * whole,
    )
