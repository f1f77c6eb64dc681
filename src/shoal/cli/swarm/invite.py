"""Prints an invitation: the one this peer came by or made, with the addresses of now; --new makes another one."""

from __future__ import annotations

import argparse
import json
import time

from shoal.cli.options import add_workspace
from shoal.cli.swarm.create import add_expires, expiry
from shoal.cli.swarm.shared import find, keep, kept
from shoal.cli.swarm.status import read
from shoal.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's name")
    parser.add_argument("--new", action="store_true", help="another one, which can be revoked apart (organiser only)")
    add_expires(parser)
    parser.add_argument("--json", action="store_true", help="as an object, for programs")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.net.identity import Identity
    from shoal.swarm.invite import MOST_PEERS, Invitation
    from shoal.swarm.roster import Roster

    config = find(args.run, args.workspace)
    roster = Roster.load(config.roster_file, Identity.load(config.identity_file))
    me = roster.entry(roster.me.id)
    others = [e for e in roster.others().values() if e.address.direct or e.address.tcp or e.address.relays]
    status = read(config.status_file) or {}
    linked = {m.get("peer") for m in status.get("members") or [] if isinstance(m, dict) and m.get("way")}
    others.sort(key=lambda e: e.peer not in linked)  # those who are there now first
    peers = {e.peer: e.address for e in [*([me] if me is not None else []), *others]}
    peers = dict(list(peers.items())[:MOST_PEERS])
    if args.new:
        if not config.organiser_file.exists():
            raise UsageError("only the organiser can make a new invitation; without --new yours is printed.")
        invitation = Invitation.new(
            roster.swarm, Identity.load(config.organiser_file), config.run_dir.name, expiry(args.expires), peers
        )
        keep(config, invitation)
    else:
        good = [i for i in kept(config) if i.id not in roster.revoked() and not i.expired()]
        if not good:
            raise UsageError(
                "there is no invitation here that is still good; "
                + ("--new makes one." if config.organiser_file.exists() else "ask the organiser for one.")
            )
        invitation = good[-1].at(peers)
    if args.json:
        held = {"invite": invitation.id, "expires": invitation.ticket.expires, "invitation": invitation.line()}
        print(json.dumps(held))
        return 0
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(invitation.ticket.expires))
    print(f"invitation {invitation.id[:12]}: whoever has this line can join until {until}\n")
    print(f"shoal swarm join {invitation.line()}")
    return 0
