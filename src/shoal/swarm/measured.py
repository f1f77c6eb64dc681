"""What the peers have measured of their links, put together, with the gaps filled in.

Each peer knows its own links only. Two peers may say different things of the one between them, and of many nothing is
known yet: then the other direction counts, or a way through others, or what is usual in this swarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from shoal.net.api import LinkState, PeerId

Links = Mapping[PeerId, Mapping[PeerId, LinkState]]  # links[a][b]: the link to b, as a sees it

UNKNOWN_RTT_S = 0.1
UNKNOWN_BYTES_PER_S = 12.5e6  # 100 Mbit/s
# Nearer or faster than this makes no difference to a part of some megabytes.
LEAST_RTT_S = 0.005
MOST_BYTES_PER_S = 125e6


class Measured:
    def __init__(self, peers: Iterable[PeerId], links: Links) -> None:
        self.peers = tuple(sorted(set(peers)))
        pairs = [(a, b) for a in self.peers for b in self.peers if a != b]
        said = {(a, b): link for a, b in pairs if (link := links.get(a, {}).get(b)) is not None}
        rtts = {pair: rtt for pair in pairs if (rtt := _rtt_s(said, *pair)) is not None}
        rates = {pair: rate for pair in pairs if (rate := _bytes_per_s(said, *pair)) is not None}
        usual = median(rates.values()) if rates else UNKNOWN_BYTES_PER_S
        self._rtts = {(a, b): rtts.get((a, b)) or _around(rtts, self.peers, a, b) for a, b in pairs}
        self._rates = {(a, b): rates.get((a, b)) or rates.get((b, a)) or usual for a, b in pairs}
        self._apart = {(a, b) for a, b in pairs if _apart(said.get((a, b)), said.get((b, a)))}

    def linked(self, a: PeerId, b: PeerId) -> bool:
        """Whether either says so; where neither says anything, they may as well try."""
        return (a, b) not in self._apart

    def rtt_s(self, a: PeerId, b: PeerId) -> float:
        return self._rtts[a, b]

    def bytes_per_s(self, a: PeerId, b: PeerId) -> float:
        """From a to b, as transfers got it lately."""
        return self._rates[a, b]

    def seconds(self, a: PeerId, b: PeerId, size: int) -> float:
        """For so many bytes from a to b."""
        return self.rtt_s(a, b) + size / self.bytes_per_s(a, b)


_Said = Mapping[tuple[PeerId, PeerId], LinkState]


def _apart(*views: LinkState | None) -> bool:
    said = [link for link in views if link is not None]
    return bool(said) and all(link.way is None for link in said)


def _rtt_s(said: _Said, a: PeerId, b: PeerId) -> float | None:
    views = [said[pair].rtt_s for pair in ((a, b), (b, a)) if pair in said]
    known = [rtt_s for rtt_s in views if rtt_s is not None]
    return sum(known) / len(known) if known else None


def _bytes_per_s(said: _Said, a: PeerId, b: PeerId) -> float | None:
    """Both ends see the same transfers. The lower word counts: nobody becomes a gateway by boasting."""
    views = [said[a, b].up_bytes_per_s] if (a, b) in said else []
    views += [said[b, a].down_bytes_per_s] if (b, a) in said else []
    return min((rate for rate in views if rate), default=None)


def _around(rtts: Mapping[tuple[PeerId, PeerId], float], peers: Iterable[PeerId], a: PeerId, b: PeerId) -> float:
    """Through whoever is nearest to both."""
    ways = [rtts[a, c] + rtts[c, b] for c in peers if (a, c) in rtts and (c, b) in rtts]
    return min(ways, default=UNKNOWN_RTT_S)
