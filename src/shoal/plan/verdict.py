"""What a layout means to whoever pays for it: speed, utilisation, money, energy, goodput, days, as intervals."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.plan.catalogue import Device, price
from shoal.plan.constants import spread
from shoal.plan.failures import FailureRate
from shoal.plan.goodput import Goodput, goodput
from shoal.plan.restarts import Style
from shoal.plan.search import Asked, Found

# Float32 weights and AdamW's two moments: what a checkpoint holds of a parameter.
SAVED_BYTES = 12
# Bytes a second that one node writes to its disk or to a bucket, where nobody has measured it (claims.md: 2.3 GB/s).
NODE_WRITES = 2e9
# What a save in the background holds training up (claims.md: 0.06 s of 14.8 GB on one H200).
BLOCKING_S = 0.1
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


@dataclass(frozen=True)
class Verdict:
    found: Found
    tokens_s: Range  # of all devices, without failures
    mfu: float  # causal attention counted half
    mfu_whole: float  # and whole
    goodput: Goodput
    days: Range  # to the end of the run, with failures
    usd_per_hour: float | None  # of all devices
    watts: float | None

    @property
    def usd(self) -> Range | None:
        return None if self.usd_per_hour is None else self.days.times(24 * self.usd_per_hour)

    @property
    def usd_per_billion(self) -> Range | None:
        """Tokens, with failures."""
        if self.usd_per_hour is None:
            return None
        hours = self.tokens_s.inverse().times(1e9 / HOUR_S / self.goodput.expected)
        return hours.times(self.usd_per_hour)

    @property
    def kwh_per_billion(self) -> Range | None:
        if self.watts is None:
            return None
        return self.tokens_s.inverse().times(1e9 / HOUR_S * self.watts / 1000 / self.goodput.expected)


def verdict(asked: Asked, device: Device, found: Found, rates: FailureRate, how: Style, usd: float | None) -> Verdict:
    """`usd`: an hour of one device; empty: the catalogue's newest price."""
    run, devices = asked.run, asked.devices
    tokens = run.train.batch * run.data.seq_len
    low, high = spread()
    expected = tokens / found.seconds
    speed = Range(expected * low, expected, expected * high)
    nodes = max(1, devices // device.per_node)
    writes = SAVED_BYTES * asked.shape.params / (nodes * NODE_WRITES)
    good = goodput(devices, device.per_node, rates, how, writes, BLOCKING_S, step_s=found.seconds)
    known = price(device) if usd is None else None
    each = usd if usd is not None else None if known is None else known.usd_per_hour
    seconds = speed.inverse().times(tokens * run.train.steps / good.expected)
    flops = {causal: asked.shape.flops_per_token(run.data.seq_len, causal) for causal in (True, False)}
    peak = asked.machine.peak * devices
    return Verdict(
        found,
        speed,
        mfu=flops[True] * expected / peak,
        mfu_whole=flops[False] * expected / peak,
        goodput=good,
        days=seconds.times(1 / DAY_S),
        usd_per_hour=None if each is None else each * devices,
        watts=None if not device.watts else device.watts * devices,
    )
