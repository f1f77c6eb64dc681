"""How busy the peers of a swarm should be, from its measured links and parts: the plan's formulas, not its guesses.

A peer's exchange lasts as long as its slowest link needs for what the routes send over it; rates are what transfers
got beside each other, so links are taken to work at the same time. What of that nothing hides, with overlap, deadline
and quorum, is `shoal.plan.swarm`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from shoal.net.api import PeerId
from shoal.plan.swarm import Codec, Link, Swarm, Utilisation, utilisation
from shoal.swarm.topology import Routes

# Links from one hour to the next, where nothing else is known (as those that shoal.plan.swarm rests on).
WORST, BEST = 0.7, 1.3


@dataclass(frozen=True)
class Predicted:
    peers: Mapping[PeerId, Utilisation]
    exchange_s: float  # of the last peer

    @property
    def busy(self) -> float:
        return mean(found.expected for found in self.peers.values())

    @property
    def low(self) -> float:
        return mean(found.low for found in self.peers.values())

    @property
    def high(self) -> float:
        return mean(found.high for found in self.peers.values())

    def __str__(self) -> str:
        return f"{self.busy:.1%} ({self.low:.1%} to {self.high:.1%})"


def predict(
    routes: Routes,
    compute_s: float,
    *,
    overlap: bool = True,
    around_s: float = 0.0,
    deadline_s: float | None = None,
    quorum: float = 1.0,
) -> Predicted:
    """`compute_s`: of a round. `around_s`: encoding, applying, agreeing: what is no transfer and hides nothing."""
    found, takes = {}, exchange_s(routes)
    size = mean(routes.sizes.values()) if routes.sizes else 0.0
    for peer, peer_s in takes.items():
        swarm = Swarm(
            peers=len(routes.measured.peers),
            step_s=compute_s,
            sync_every=1,
            params=size * 8,
            codec=Codec("measured", 1.0, False, 1, "the sizes of the parts"),  # a bit a parameter: params are bits
            link=_link(routes, peer, size, peer_s),
            overlap=overlap,
            around_s=around_s,
            quorum=quorum,
            deadline_s=deadline_s,
        )
        found[peer] = utilisation(swarm)
    return Predicted(found, max(takes.values(), default=0.0))


def exchange_s(routes: Routes) -> dict[PeerId, float]:
    """Until each peer has all parts."""
    on_link: dict[tuple[PeerId, PeerId], int] = {}
    for flow in routes.flows():
        key = flow.source, flow.receiver
        on_link[key] = on_link.get(key, 0) + flow.size
    takes = dict.fromkeys(routes.measured.peers, 0.0)
    for (source, receiver), size in on_link.items():
        takes[receiver] = max(takes[receiver], routes.measured.seconds(source, receiver, size))
    for owner in routes.sizes:  # what comes through a gateway is not there before it has it
        for receiver in routes.measured.peers:
            if receiver != owner:
                takes[receiver] = max(takes[receiver], routes.arrives_s(receiver, owner))
    return takes


def _link(routes: Routes, peer: PeerId, size: float, takes_s: float) -> Link:
    """The one link with which the plan's all-gather takes as long as this peer's exchange does."""
    others = len(routes.measured.peers) - 1
    rtt_s = max((routes.measured.rtt_s(other, peer) for other in routes.measured.peers if other != peer), default=0.0)
    wire_s = max(takes_s - rtt_s / 2, 1e-9)
    rate = max(8 * size * others / wire_s, 1.0)
    return Link(rate, rate, rtt_s, achieved=True, worst=WORST, best=BEST)
