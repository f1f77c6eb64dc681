"""What a node tells about itself and the others: the contents of status.json, which `shoal swarm status` shows."""

from __future__ import annotations

import time
from typing import Any

from shoal.net.api import LinkState, PeerId
from shoal.swarm.messages import Status
from shoal.swarm.node import Node
from shoal.swarm.ranges import count
from shoal.swarm.topology_picture import picture
from shoal.swarm.topology_predict import predict
from shoal.values import finite


def status(node: Node, events: list[dict[str, Any]]) -> dict[str, Any]:
    head, links, now = node.chain.head, node.links(), time.monotonic()
    branch = next((r for r in node.chain.past(head.hash) if r.kind in ("branch", "merge")), None)
    peers = dict.fromkeys([*head.members, node.me, *(p for p, link in links.items() if link.way is not None)])
    regions = [] if node.router.routes is None else [list(region) for region in node.router.routes.regions]
    place = {peer: i for i, peer in enumerate(peer for region in regions for peer in region)}
    peers = dict.fromkeys(sorted(peers, key=lambda peer: place.get(peer, len(place))))  # neighbours beside each other
    members = [_member(node, peer, links.get(peer), now) for peer in peers]
    busy = [m["busy"] for m in members if m["busy"] is not None]
    return {
        "time": time.time(),
        "self": node.me,
        "name": node.run_spec.name,
        "round": head.round,
        "head": head.hash,
        "branch": (head.ledger.mine and f"{len(head.members)} of {len(head.ledger.lanes)} peers") or None,
        "since": None if branch is None else branch.round,
        "split": _split(node),
        "mode": node.decider.mode,
        "done": head.ledger.done,
        "total": node.total,
        "tokens": head.tokens,
        "members": members,
        "exchange_s": node.exchange_s,
        "round_s": node.round_s,
        "utilisation": sum(busy) / len(busy) if busy else None,
        "predicted": _predicted(node),
        "topology": None if node.router.routes is None else picture(node.router.routes, node.name_of),
        **node.router.told(links),
        "events": events,
    }


def _split(node: Node) -> dict[str, Any] | None:
    """Peers whose weights differ, by what they have told."""
    split = node.training.doubt.split
    return None if split is None else {"round": split.round, "sides": [list(side) for side in split.sides.values()]}


def _member(node: Node, peer: PeerId, link: LinkState | None, now: float) -> dict[str, Any]:
    head = node.chain.head
    told = _status(node, peer)
    took = {part.peer: part for part in head.took}
    samples = sum(count(part.used) for part in head.took)
    heard = node.decider.heard.get(peer)
    return {
        "peer": peer,
        "name": node.name_of(peer),
        "member": peer in head.members,
        "way": None if link is None else link.way,
        "rtt_s": None if link is None else link.rtt_s,
        "up": None if link is None else link.up_bytes_per_s,
        "down": None if link is None else link.down_bytes_per_s,
        "loss": None if link is None else link.loss,
        "heard_s": None if heard is None else now - heard.at,
        "share": count(took[peer].used) / samples if peer in took and samples else None,
        "tokens_per_s": told.tokens_per_s,
        "busy": told.busy,
        "step_loss": told.loss,
        "head": head.hash if peer == node.me else None if heard is None else heard.head,
        "late": bool(head.took) and peer in head.members and peer not in took,
    }


def _predicted(node: Node) -> float | None:
    """How busy the peers should be, by these links."""
    routes = node.router.routes
    if routes is None or len(routes.sizes) < 2:
        return None
    overlap = node.run_spec.swarm.overlap
    return predict(routes, node.round_s, overlap=overlap, deadline_s=2 * node.deadline_s).busy


def _status(node: Node, peer: PeerId) -> Status:
    """Of a peer's training: what it says itself."""
    if peer == node.me:
        return Status(**{k: finite(node.work.status.get(k)) for k in Status.__dataclass_fields__})
    return node.talk.others[peer].status if peer in node.talk.others else Status()
