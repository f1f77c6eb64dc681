"""How busy peers are that train one model over slow links. No torch.

A round is H inner steps on each peer and then an exchange of what they have changed (the pseudo-gradient), compressed.
While it lasts the devices wait, unless it overlaps with the next round's steps. With a payload of p bytes and n peers:

    all_gather    every peer sends its payload to all others: (n-1) p up, (n-1) p down, both at once
    store         it is uploaded once to an object store, then the others' are downloaded: p up, then (n-1) p down
    ring          all-reduce in 2 (n-1) turns of p/n: 2 (n-1)/n p each way
    tree          sums go up a binary tree, the result comes down: 2 p in and p out, then the reverse, in pieces

Ring and tree move least where peers are many, but can only add up what can be added (not a choice of top values), and
wait for the slowest link of all. Utilisation is the share of time in which the devices compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

from shoal.errors import SpecError

Exchange = Literal["all_gather", "store", "ring", "tree"]


@dataclass(frozen=True)
class Codec:
    """How a pseudo-gradient travels."""

    name: str
    bits: float  # a parameter, indices and scales included
    adds_up: bool  # payloads can be summed on their way
    shown: int  # the longest H that is known to train well with it
    source: str


# Bits of bf16 to 2-bit and of top-k gaps are those of `shoal.codec`'s payloads, scales and header included
# (benchmarks/swarm_codec.py, 2026-11-16).
CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("bf16", 16, True, 500, "OpenDiLoCo, arXiv 2407.07852 (fp16, 1.1B)"),
        Codec("int8", 8.063, True, 100, "INTELLECT-1, arXiv 2412.01152 (10B)"),
        Codec("int4", 4.125, True, 100, "Streaming DiLoCo, arXiv 2501.18512 (E3M0; H from memory)"),
        Codec("2-bit", 2.094, True, 30, "MuLoCo, arXiv 2505.23725 (with error feedback; H from memory)"),
        Codec("sign", 7 * 4 / 64, False, 1, "Psyche: DCT of 64, top 4, one bit (state.toml)"),
        Codec(
            "top-k", 0.227, False, 30, "Covenant-72B, arXiv 2603.08163: 64 of 4,096, 2 bits; measured with its scales"
        ),
        Codec(
            "top-k gaps", 0.156, False, 30, "the same with its indices coded as gaps, as `swarm.codec: topk` sends it"
        ),
    )
}

# Of a link's rate, what many sockets move at 100 ms there and back, measured at 100 Mbit/s (2026-11, 8 sockets, an
# emulator with random loss): at no loss, at 0.1%, at 1%; the least, the middle, the most of the runs.
_LOSSES = (1e-5, 1e-3, 1e-2)
_MOVED: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "bbr": ((0.70, 0.75, 0.79), (0.51, 0.56, 0.61), (0.29, 0.35, 0.40)),
    "cubic": ((0.70, 0.75, 0.79), (0.25, 0.38, 0.45), (0.10, 0.18, 0.22)),
    "quic": ((0.69, 0.90, 0.92), (0.26, 0.33, 0.39), (0.09, 0.12, 0.14)),
}
_MEASURED_RTT_S = 0.1
_LEAST = 0.01
_LONGEST = 1 << 24  # inner steps of a round that are looked at


@dataclass(frozen=True)
class Link:
    """Of a peer to the others."""

    up_bits_per_s: float
    down_bits_per_s: float
    rtt_s: float = 0.1
    loss: float = 0.0  # of packets
    control: str = "bbr"  # of congestion: bbr, cubic, quic
    achieved: bool = False  # the rates are what transfers got, not what the line is sold as
    worst: float = 1.0  # of these rates: what a bad and a good hour have
    best: float = 1.0

    def moved(self) -> tuple[float, float, float]:
        """Share of the rates that transfers get: the least, the expected, the most."""
        middle = (1.0, 1.0, 1.0) if self.achieved else self._measured()
        return middle[0] * self.worst, middle[1], middle[2] * self.best

    def _measured(self) -> tuple[float, float, float]:
        """Between the measured losses by their logarithm; loss hurts in proportion to the way there and back."""
        if self.control not in _MOVED:
            raise SpecError(f"there is no congestion control '{self.control}'; use one of {', '.join(_MOVED)}.")
        at = math.log10(min(max(self.loss, _LOSSES[0]), 1.0))
        knots = [math.log10(loss) for loss in _LOSSES]
        i = 0 if at < knots[1] else 1
        weight = (at - knots[i]) / (knots[i + 1] - knots[i])
        lossless, before, after = _MOVED[self.control][0], _MOVED[self.control][i], _MOVED[self.control][i + 1]
        least, middle, most = (
            min(clean, max(_LEAST, clean - (clean - (b + weight * (a - b))) * self.rtt_s / _MEASURED_RTT_S))
            for clean, b, a in zip(lossless, before, after, strict=True)
        )
        return least, middle, most


@dataclass(frozen=True)
class Swarm:
    peers: int
    step_s: float  # of one inner step
    sync_every: int  # inner steps of a round
    params: float
    codec: Codec
    link: Link
    exchange: Exchange = "all_gather"
    overlap: bool = False  # the exchange runs beside the next round's steps
    around_s: float = 0.0  # compressing, applying: what is no transfer
    spread: float = 0.0  # standard deviation of the peers' round times, as a share of the mean
    quorum: float = 1.0  # share of the peers that a round waits for
    deadline_s: float | None = None  # after the steps; then it goes on without the rest

    @property
    def compute_s(self) -> float:
        return self.sync_every * self.step_s

    @property
    def payload_bytes(self) -> float:
        return self.params * self.codec.bits / 8


@dataclass(frozen=True)
class Utilisation:
    """Share of time in which a peer's devices compute; between `low` and `high` as its link is bad or good."""

    expected: float
    low: float
    high: float
    compute_s: float  # of a round
    exchange_s: float
    exposed_s: float  # of the exchange and the wait for others, what nothing hides
    sent_bytes_per_step: float
    received_bytes_per_step: float
    in_time: float  # share of the peers whose part is in a round's sum; the others' stays for the next

    def __str__(self) -> str:
        return f"{self.expected:.1%} ({self.low:.1%} to {self.high:.1%})"


def utilisation(swarm: Swarm) -> Utilisation:
    _check(swarm)
    worst, middle, best = swarm.link.moved()
    sent, received = traffic_bytes(swarm)
    exchange_s, exposed_s = exchange_time_s(swarm, middle), _exposed_s(swarm, middle)
    low, expected, high = (
        swarm.compute_s / (swarm.compute_s + _exposed_s(swarm, moved)) for moved in (worst, middle, best)
    )
    return Utilisation(
        expected,
        low,
        high,
        swarm.compute_s,
        exchange_s,
        exposed_s,
        sent / swarm.sync_every,
        received / swarm.sync_every,
        _in_time(swarm, exchange_s),
    )


def traffic_bytes(swarm: Swarm) -> tuple[float, float]:
    """What the busiest peer sends and receives in a round."""
    n, p = swarm.peers, swarm.payload_bytes
    if n == 1:
        return 0.0, 0.0
    if swarm.exchange == "ring":
        return 2 * (n - 1) / n * p, 2 * (n - 1) / n * p
    if swarm.exchange == "tree":
        children = min(2, n - 1)
        return (1 + children) * p, (children + 1) * p
    return (p if swarm.exchange == "store" else (n - 1) * p), (n - 1) * p


def exchange_time_s(swarm: Swarm, moved: float) -> float:
    """From the end of the steps to the new weights, when a transfer gets the share `moved` of the link's rates."""
    n, p, link = swarm.peers, swarm.payload_bytes, swarm.link
    if n == 1:
        return swarm.around_s
    up, down = (rate * moved / 8 for rate in (link.up_bits_per_s, link.down_bits_per_s))
    sent, received = traffic_bytes(swarm)
    if swarm.exchange == "store":  # an object is there when it is whole
        wire_s, turns = sent / up + received / down, 4
    elif swarm.exchange == "tree":
        children = min(2, n - 1)
        wire_s = max(children * p / down, p / up) + max(p / down, children * p / up)
        turns = 2 * math.ceil(math.log2(n))
    else:
        wire_s, turns = max(sent / up, received / down), 2 * (n - 1) if swarm.exchange == "ring" else 1
    return wire_s + turns * link.rtt_s / 2 + swarm.around_s


@dataclass(frozen=True)
class Reach:
    """The fewest inner steps a round with which a codec reaches a utilisation; None where no number does."""

    codec: Codec
    sync_every: int | None
    exchange: Exchange

    @property
    def shown(self) -> bool:
        """Whether rounds that long are known to train well with it."""
        return self.sync_every is not None and self.sync_every <= self.codec.shown


def reach(swarm: Swarm, target: float = 0.97) -> list[Reach]:
    """For every codec, the shortest rounds that reach the target, by the exchange that is quickest with it."""
    if not 0 < target < 1:
        raise SpecError(f"a utilisation of {target:g} cannot be asked for; give a share between 0 and 1, such as 0.97.")
    found = []
    for codec in CODECS.values():
        ways: list[Exchange] = ["all_gather", "ring", "tree"] if codec.adds_up else ["all_gather"]
        if swarm.exchange == "store":
            ways = ["store"]
        found.append(min((_shortest(replace(swarm, codec=codec, exchange=way), target) for way in ways), key=_length))
    return found


def advise(swarm: Swarm, target: float = 0.97) -> str:
    """One sentence: what reaches the target, with rounds no longer than are known to train well."""
    now = utilisation(swarm).expected
    begin = f"{swarm.codec.name} every {swarm.sync_every} steps makes {now:.1%}"
    if now >= target:
        return f"{begin}, which is {target:.0%} or more"
    for overlap in (False, True):
        good = [r for r in reach(replace(swarm, overlap=swarm.overlap or overlap), target) if r.shown]
        if good:
            best = min(good, key=lambda r: _length(r) / r.codec.shown)  # the furthest within what was shown
            also = ", overlapped with the next round's steps" if overlap and not swarm.overlap else ""
            return (
                f"{begin}; {best.codec.name} every {best.sync_every} steps ({best.exchange}){also} reaches {target:.0%}"
            )
    best = min(reach(replace(swarm, overlap=True), target), key=_length)
    needs = f"needs {best.codec.name} every {best.sync_every} steps" if best.sync_every else "is out of reach"
    return f"{begin}; {target:.0%} {needs} even overlapped: use faster links, or peers that are less unlike"


def _length(r: Reach) -> float:
    return math.inf if r.sync_every is None else r.sync_every


def _shortest(swarm: Swarm, target: float) -> Reach:
    """Longer rounds never lower the utilisation, so doubling and halving finds it."""

    def enough(steps: int) -> bool:
        return utilisation(replace(swarm, sync_every=steps)).expected >= target

    high = 1
    while not enough(high):
        high *= 2
        if high > _LONGEST:
            return Reach(swarm.codec, None, swarm.exchange)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return Reach(swarm.codec, high, swarm.exchange)


def _exposed_s(swarm: Swarm, moved: float) -> float:
    late_s = exchange_time_s(swarm, moved) + _wait_s(swarm)
    if swarm.deadline_s is not None:
        late_s = min(late_s, swarm.deadline_s)
    return max(0.0, late_s - swarm.compute_s) if swarm.overlap else late_s


def _wait_s(swarm: Swarm) -> float:
    """From the mean peer's last step to that of the last one that counts (Blom's order statistics)."""
    needed = math.ceil(swarm.quorum * swarm.peers)
    place = (needed - 0.375) / (swarm.peers + 0.25)
    return max(0.0, NormalDist().inv_cdf(place) * swarm.spread * swarm.compute_s)


def _in_time(swarm: Swarm, exchange_s: float) -> float:
    if swarm.deadline_s is None:
        return math.ceil(swarm.quorum * swarm.peers) / swarm.peers if swarm.spread else 1.0
    slack_s, sd_s = swarm.deadline_s - exchange_s, swarm.spread * swarm.compute_s
    if swarm.overlap:
        slack_s += swarm.compute_s
    return NormalDist().cdf(slack_s / sd_s) if sd_s else float(slack_s >= 0)


def _check(swarm: Swarm) -> None:
    if swarm.peers < 1 or swarm.sync_every < 1 or swarm.step_s <= 0:
        raise SpecError("a swarm needs at least one peer, one step a round and a step that takes time.")
    if swarm.exchange in ("ring", "tree") and not swarm.codec.adds_up:
        raise SpecError(
            f"payloads of the codec '{swarm.codec.name}' cannot be added on their way, as a {swarm.exchange} does; "
            f"use all_gather or store."
        )
    if not 0 < swarm.quorum <= 1:
        raise SpecError(f"a quorum of {swarm.quorum:g} is no share of the peers; give one above 0 and at most 1.")
