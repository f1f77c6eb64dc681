"""What a peer of a cut model tells about itself and the others: the contents of status.json, which `shoal swarm status`
shows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from shoal.net.api import Endpoint, LinkState, PeerId
from shoal.spec.run import Run
from shoal.stages.peer import Peer
from shoal.stages.seats import Seats
from shoal.swarm.roster import Roster


class View:
    def __init__(
        self, run: Run, roster: Roster, endpoint: Endpoint, seats: Seats, events: Iterable[dict[str, Any]]
    ) -> None:
        self._run, self._roster, self._endpoint, self._seats, self._events = run, roster, endpoint, seats, events
        self.peer: Peer | None = None  # once it holds a stage

    def status(self) -> dict[str, Any]:
        peer, links, layout = self.peer, self._endpoint.links(), self._seats.layout
        commit = peer.plan.commit if peer is not None and peer.plan is not None else None
        stages = layout.stages if layout is not None else ()
        stage = {p: i + 1 for i, peers in enumerate(stages) for p in peers}
        members = dict.fromkeys([*stage, *self._roster.members()])
        return {
            "time": time.time(),
            "self": self._endpoint.id,
            "name": self._run.name,
            "stages": self._run.swarm.stages.count,
            "wanted": self._run.swarm.peers,
            "step": 0 if peer is None else peer.at,
            "steps": self._run.steps,
            "loss": None if commit is None else commit.loss,
            "members": [self._member(p, stage.get(p), links.get(p)) for p in members],
            "events": list(self._events),
        }

    def _member(self, who: PeerId, stage: int | None, link: LinkState | None) -> dict[str, Any]:
        return {
            "peer": who,
            "name": self._roster.name(who),
            "stage": stage,
            "way": None if link is None else link.way,
            "rtt_s": None if link is None else link.rtt_s,
            "up": None if link is None else link.up_bytes_per_s,
            "down": None if link is None else link.down_bytes_per_s,
            "loss": None if link is None else link.loss,
            "heard_s": None if link is None else link.heard_s,
            "state": self._state(who, stage, link),
        }

    def _state(self, who: PeerId, stage: int | None, link: LinkState | None) -> str:
        plan = None if self.peer is None else self.peer.plan
        if who not in self._roster:
            return "revoked" if who in self._roster.revoked() else "unknown"
        if who != self._endpoint.id and (link is None or link.way is None):
            return "away"
        if stage is None:
            return "waits for a stage"
        if plan is None:
            return "waits"
        return "computes" if who in plan.members else "fetches its state" if who in plan.learners else "waits"
