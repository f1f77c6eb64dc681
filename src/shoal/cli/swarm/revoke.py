"""The organiser puts a peer out, or ends an invitation: a signed word that spreads from peer to peer; links are closed.

Peers that came by an invitation stay when it is revoked, unless --with-peers says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace
from shoal.cli.swarm.shared import find, free, is_line, kept, read_line
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.swarm.config import NodeConfig
    from shoal.swarm.entries import Revocation
    from shoal.swarm.roster import Roster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's name")
    parser.add_argument(
        "what",
        metavar="PEER|INVITE",
        help="a peer's name or key, an invitation's id, line or @FILE; a beginning will do",
    )
    parser.add_argument("--with-peers", action="store_true", help="with an invitation: all that came by it, too")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.net.identity import Identity
    from shoal.swarm.control import running, tell
    from shoal.swarm.entries import revocation
    from shoal.swarm.roster import Roster

    config = find(args.run, args.workspace)
    if not config.organiser_file.exists():
        raise UsageError(
            "only the organiser can revoke, and its key is not on this machine; ask whoever made the swarm."
        )
    roster = Roster.load(config.roster_file, Identity.load(config.identity_file))
    what, id, keep = _target(config, roster, args.what, args.with_peers)
    if id == roster.me.id:
        raise UsageError(f"that is this peer itself; `shoal swarm leave {args.run}` ends it.")
    new = revocation(roster.swarm, Identity.load(config.organiser_file), what, id, keep, roster.now())
    stay = f"; {len(keep)} that came by it stay" if what == "invite" and keep else ""
    called = f"peer {roster.name(id)} ({id[:12]})" if what == "peer" else f"invitation {id[:12]}"
    if running(config):
        tell(config, "revoke", revocation=new.to_json())
        print(f"revoked {called}; the node spreads it{stay}")
        return 0
    told = asyncio.run(_spread(free(config), new))
    later = "" if told else "; nobody was there to tell, so it spreads when this peer is started"
    print(f"revoked {called}; {told} peers were told{stay}{later}")
    return 0


def _target(config: NodeConfig, roster: Roster, given: str, with_peers: bool) -> tuple[str, str, list[str]]:
    """What is meant: a peer, or an invitation, and who stays all the same."""
    entries = {peer: roster.entry(peer) for peer in roster.summary()}
    invites = {e.admission.invite for e in entries.values() if e is not None and e.admission.invite}
    invites |= {i.id for i in kept(config)}
    if is_line(given):
        found = [("invite", read_line(given).id)]
    else:
        found = [("peer", peer) for peer in roster.find(given)]
        found += [("invite", invite) for invite in sorted(invites) if len(given) >= 4 and invite.startswith(given)]
    if len(found) != 1:
        names = ", ".join(sorted(f"{roster.name(p)} ({p[:12]})" for p in entries)[:12])
        lines = ", ".join(sorted(i[:12] for i in invites))
        many = "means several" if found else "is no peer and no invitation"
        raise UsageError(f"'{given[:40]}' {many}: the peers are {names}; the invitations {lines or 'none'}.")
    what, id = found[0]
    if what == "invite":
        came = [p for p, e in entries.items() if e is not None and e.admission.invite == id]
        return what, id, [] if with_peers else came
    seen = [p for p, e in entries.items() if e is not None and e.witness is not None and e.witness.by == id]
    return what, id, seen


async def _spread(config: NodeConfig, new: Revocation) -> int:
    from shoal.net.identity import Identity
    from shoal.swarm.enter import Heard, visit
    from shoal.swarm.roster import Roster

    heard = Heard()
    roster = Roster.load(config.roster_file, Identity.load(config.identity_file), heard)
    async with visit(config, roster, heard) as (endpoint, gossip):
        waiting = 30 if roster.others() else 0
        while waiting and not any(link.way is not None for link in endpoint.links().values()):
            waiting -= 1
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.3 if waiting else 0.0)
        roster.take([], [new.to_json()])
        told = [p for p, link in endpoint.links().items() if link.way is not None and p in roster]
        await asyncio.gather(*(gossip.ask(p, timeout_s=5.0) for p in told), return_exceptions=True)
        return len(told)
