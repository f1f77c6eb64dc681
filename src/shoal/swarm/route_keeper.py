"""Keeps the routes current: what peers say of their links, what this one measures, and the choice from both.

Each peer tells the others now and then how its links stand (`telling`, a line for each); what they say is taken with
care (`hear`): it may be nonsense, or a lie. The worst that a lie does is that a part is asked for at the wrong place
first, and after some seconds everywhere; what arrives is checked by its hash in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shoal.net.api import LinkState, PeerId
from shoal.swarm.messages import MOST_LINKS, read_links
from shoal.swarm.topology import Choice, Routes, routes
from shoal.values import by_name, field, whole

EVERY_S = 10.0  # between two choices, unless the members have changed


class Router:
    def __init__(self, me: PeerId, event: Callable[..., None] = lambda kind, **fields: None) -> None:
        self._me, self._event = me, event
        self._said: dict[PeerId, dict[PeerId, LinkState]] = {}
        self._sizes: dict[PeerId, int] = {}
        self._chosen_at = -math.inf
        self.routes: Routes | None = None

    def telling(self, links: Mapping[PeerId, LinkState]) -> list[list[Any]]:
        """For others' `hear`: peer, way, round trip, bytes a second up and down."""
        return [
            [peer, link.way, _rounded(link.rtt_s), _rounded(link.up_bytes_per_s), _rounded(link.down_bytes_per_s)]
            for peer, link in sorted(links.items())[:MOST_LINKS]
        ]

    def hear(self, peer: PeerId, said: Mapping[PeerId, LinkState]) -> None:
        """What a peer tells of its links, as `messages` has read it."""
        self._said[peer] = dict(said)

    def size(self, owner: PeerId, size: int) -> None:
        """How large a peer's newest part is."""
        self._sizes[owner] = size

    def choose(self, members: Iterable[PeerId], links: Mapping[PeerId, LinkState], now: float) -> Routes:
        """To be called as often as one likes; chooses anew now and then, and when the members have changed."""
        peers = tuple(sorted({*members, self._me}))
        held = self.routes
        if held is not None and held.measured.peers == peers and now - self._chosen_at < EVERY_S:
            return held
        self._said = {peer: said for peer, said in self._said.items() if peer in peers}
        self._sizes = {peer: size for peer, size in self._sizes.items() if peer in peers}
        self.routes = routes(peers, {**self._said, self._me: links}, self._sizes, held)
        self._chosen_at = now
        if held is None or held.regions != self.routes.regions:
            self._event("routes", regions=[[peer[:8] for peer in region] for region in self.routes.regions])
        return self.routes

    def told(self, links: Mapping[PeerId, LinkState]) -> dict[str, Any]:
        """All that the routes are chosen from, for `routes_of`."""
        said = {peer: self.telling(theirs) for peer, theirs in self._said.items()}
        return {"links": {**said, self._me: self.telling(links)}, "sizes": dict(self._sizes)}

    def choice(self, owner: PeerId) -> Choice | None:
        """From whom to take a part; None before anything is chosen, or of a stranger."""
        if self.routes is None or owner not in self.routes.measured.peers:
            return None
        return self.routes.choice(self._me, owner)


def routes_of(told: Mapping[str, Any]) -> Routes:
    """The routes by what `Router.told` says; for those who look from outside. BadValue for what is none."""
    links = field(told, "links", by_name(read_links, MOST_LINKS))
    return routes(sorted(links), links, field(told, "sizes", by_name(whole, MOST_LINKS)))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
