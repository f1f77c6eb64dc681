"""From whom each peer takes each part, chosen from the measured links: regions first, then between regions.

All-to-all sends a part to a far region once for every peer there. Here one of them, the part's *gateway*, takes it
from its owner, and the others take it from the gateway and from each other, piece by piece as it arrives; so what
crosses between regions is each part once, and nobody sends more than before. Gateways are dealt out so that each has
about the same time of transfers. Where an owner's link to a region is bad and another region has a good one to both,
the part goes through there.

Pure functions: the same links give the same routes. Peers whose measurements differ a little may choose differently;
then a part crosses twice, and no more is lost: every other peer is asked too when the first choice brings nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.net.api import PeerId
from shoal.swarm.measured import Links, Measured
from shoal.swarm.regions import STICKY, Regions, regions

DETOUR = 2.0  # how much faster the way through another region has to be
PATIENCE_S = 2.0


@dataclass(frozen=True)
class Choice:
    first: tuple[PeerId, ...]  # to be asked at once, the best first
    later: tuple[PeerId, ...]  # when nothing has come for `wait_s`
    wait_s: float


@dataclass(frozen=True)
class Flow:
    """A part on one of its ways."""

    owner: PeerId
    source: PeerId
    receiver: PeerId
    size: int


@dataclass(frozen=True)
class Routes:
    regions: Regions
    gateways: Mapping[tuple[int, PeerId], PeerId]  # (region, owner) → who takes the owner's part there
    through: Mapping[tuple[int, PeerId], PeerId]  # → from whom: the owner, or another region's gateway
    sizes: Mapping[PeerId, int]
    measured: Measured

    def region(self, peer: PeerId) -> int:
        return next(i for i, region in enumerate(self.regions) if peer in region)

    def sources(self, receiver: PeerId, owner: PeerId) -> list[PeerId]:
        """All who may have an owner's part, the best first."""
        choice = self.choice(receiver, owner)
        return [*choice.first, *choice.later]

    def best(self, receiver: PeerId, owner: PeerId) -> PeerId:
        """From whom a part comes."""
        here = self.region(receiver)
        if owner in self.regions[here]:
            return owner
        gateway = self.gateways[here, owner]
        return self.through[here, owner] if gateway == receiver else gateway

    def choice(self, receiver: PeerId, owner: PeerId) -> Choice:
        if receiver == owner:
            return Choice((), (), 0.0)
        region, best = self.regions[self.region(receiver)], self.best(receiver, owner)
        # Who is near trades pieces; a gateway leaves its fellows alone, for they have nothing before it does.
        fellows = [peer for peer in region if peer not in (receiver, best)] if best in region else []
        first = [peer for peer in (best, *self._nearest(fellows, receiver)) if self.measured.linked(peer, receiver)]
        rest = [peer for peer in self.measured.peers if peer not in (receiver, owner, *first)]
        later = [owner] * (owner not in first) + self._nearest(rest, receiver)
        if not first:
            first, later = later, []
        return Choice(tuple(first), tuple(later), PATIENCE_S + 2 * self.arrives_s(receiver, owner))

    def flows(self) -> list[Flow]:
        """Each part's ways to all peers, by everybody's first choice."""
        peers = self.measured.peers
        return [
            Flow(owner, self.best(receiver, owner), receiver, self.sizes[owner])
            for owner in peers
            if owner in self.sizes
            for receiver in peers
            if receiver != owner
        ]

    def crossing_bytes(self) -> int:
        """What passes between regions in a round."""
        return sum(flow.size for flow in self.flows() if self.region(flow.source) != self.region(flow.receiver))

    def all_to_all_bytes(self) -> int:
        """What would, if everybody took every part from its owner."""
        outside = {peer: len(self.measured.peers) - len(self.regions[self.region(peer)]) for peer in self.sizes}
        return sum(size * outside[owner] for owner, size in self.sizes.items())

    def arrives_s(self, receiver: PeerId, owner: PeerId) -> float:
        """Until the part is there: pieces follow each other, so the slowest link counts, and all latencies."""
        at, latency_s, slowest_s, size = receiver, 0.0, 0.0, self.sizes.get(owner, 0)
        while at != owner:
            source = self.best(at, owner)
            latency_s += self.measured.rtt_s(source, at)
            slowest_s = max(slowest_s, size / self.measured.bytes_per_s(source, at))
            at = source
        return latency_s + slowest_s

    def _nearest(self, peers: Iterable[PeerId], receiver: PeerId) -> list[PeerId]:
        """Those that can be reached first, then by how long a part takes from them."""
        size = max(self.sizes.values(), default=1 << 20)
        far = {peer: self.measured.seconds(peer, receiver, size) for peer in peers}
        return sorted(far, key=lambda peer: (not self.measured.linked(peer, receiver), far[peer], peer))


def routes(peers: Iterable[PeerId], links: Links, sizes: Mapping[PeerId, int], before: Routes | None = None) -> Routes:
    """`sizes`: of the peers' parts. `before`: what is in use; it is left only for something clearly better."""
    measured = Measured(peers, links)
    sizes = {peer: sizes[peer] for peer in measured.peers if peer in sizes}
    found = regions(measured, before.regions if before else ())
    gateways = _gateways(found, measured, sizes, before)
    return Routes(found, gateways, _through(found, measured, gateways), sizes, measured)


def _gateways(
    found: Regions, measured: Measured, sizes: Mapping[PeerId, int], before: Routes | None
) -> dict[tuple[int, PeerId], PeerId]:
    """The largest parts first, each to whoever would be done with it soonest."""
    chosen: dict[tuple[int, PeerId], PeerId] = {}
    size = max(sizes.values(), default=1 << 20)
    for i, region in enumerate(found):
        busy_s = dict.fromkeys(region, 0.0)
        used = _used(region, before)
        owners = [peer for peer in measured.peers if peer not in region]
        for owner in sorted(owners, key=lambda peer: (-sizes.get(peer, size), peer)):
            takes_s = {peer: measured.seconds(owner, peer, sizes.get(owner, size)) for peer in region}
            done = {
                peer: (busy_s[peer] + takes_s[peer]) / (STICKY if used.get(owner) == peer else 1.0) for peer in region
            }
            best = min(region, key=lambda peer: (not measured.linked(owner, peer), done[peer], peer))
            chosen[i, owner] = best
            busy_s[best] += takes_s[best]
    return chosen


def _used(region: tuple[PeerId, ...], before: Routes | None) -> dict[PeerId, PeerId]:
    """Which of these peers was the gateway for each owner."""
    if before is None:
        return {}
    return {owner: peer for (_, owner), peer in before.gateways.items() if peer in region}


def _through(
    found: Regions, measured: Measured, gateways: Mapping[tuple[int, PeerId], PeerId]
) -> dict[tuple[int, PeerId], PeerId]:
    """From whom a gateway takes a part. The owner reaches whoever is in between twice as fast: no circle can be."""

    def rate(a: PeerId, b: PeerId) -> float:
        return measured.bytes_per_s(a, b) if measured.linked(a, b) else 0.0

    chosen = {}
    for (i, owner), gateway in gateways.items():
        best, fastest = owner, DETOUR * rate(owner, gateway)
        for j in range(len(found)):
            between = gateways.get((j, owner))
            if between is None or j == i:
                continue
            found_rate = min(rate(owner, between), rate(between, gateway))
            if found_rate > fastest:
                best, fastest = between, found_rate
        chosen[i, owner] = best
    return chosen
