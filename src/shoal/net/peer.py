"""One peer as the endpoint sees it: where it may be, by which connections it is reached, what was measured."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shoal.net.api import Address, LinkState, PeerId, Way
from shoal.net.carrier import Carrier

RANK: dict[Way, int] = {"tcp": 0, "direct": 1, "relay": 2}


@dataclass
class Peer:
    """All that this endpoint knows of another, and the connections to it."""

    id: PeerId
    known: bool = False
    told: Address = field(default_factory=Address)  # by whoever knows it
    said: Address = field(default_factory=Address)  # by itself, in its greeting
    carriers: list[Carrier] = field(default_factory=list)
    keepers: dict[asyncio.Task[None], asyncio.Event] = field(default_factory=dict)  # set: something has changed
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    way: Way | None = None  # as last journaled
    heard_s: float | None = None
    rtt_s: float | None = None
    loss: float | None = None
    up: float | None = None
    down: float | None = None
    sent_bytes: int = 0  # of carriers that are gone
    received_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # where, why: each is journaled once

    def best(self) -> Carrier | None:
        there = [c for c in self.carriers if not c.closed]
        return min(there, key=lambda c: (c.retiring, c.suspect, RANK[c.way()], -c.born_s), default=None)

    def changed(self) -> None:
        """A carrier more or less, one that is silent, another address."""
        for event in self.keepers.values():
            event.set()

    def sound(self) -> Way | None:
        """The best way of those that nothing speaks against."""
        best = self.best()
        return None if best is None or best.retiring or best.suspect else best.way()

    def address(self) -> Address:
        """All places it may be at."""
        return _union(self.told, self.said)

    def remember(self, carrier: Carrier) -> None:
        """What was measured stays when the connection goes."""
        self.heard_s = max(self.heard_s or 0.0, carrier.heard_s)
        self.rtt_s = carrier.rtt_s or self.rtt_s
        self.loss = carrier.loss.share if carrier.loss.share is not None else self.loss
        self.up = carrier.up_bytes_per_s or self.up
        self.down = carrier.down.bytes_per_s or self.down

    def state(self, now: float) -> LinkState:
        best = self.best()
        for carrier in self.carriers:
            self.heard_s = max(self.heard_s or 0.0, carrier.heard_s)
        if best is not None:
            self.remember(best)
        return LinkState(
            self.id,
            best.way() if best is not None else None,
            self.rtt_s if best is not None else None,
            self.loss,
            self.up,
            self.down,
            None if self.heard_s is None else now - self.heard_s,
            self.sent_bytes + sum(c.sent_bytes for c in self.carriers),
            self.received_bytes + sum(c.received_bytes for c in self.carriers),
        )


def _union(a: Address, b: Address) -> Address:
    def both(x: tuple[str, ...], y: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*x, *y)))

    return Address(both(a.relays, b.relays), both(a.direct, b.direct), both(a.tcp, b.tcp))
