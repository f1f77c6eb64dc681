"""Does what a newcomer does, and names what keeps this machine from the swarm: an expired invitation, a relay that is
down, no UDP, a symmetric NAT, broken IPv6, a wrong clock, peers that refuse or are away. Nothing is trained."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from dataclasses import asdict, replace

from shoal.cli.swarm.shared import add_peer, read_line, settled
from shoal.errors import DONE, WRONG_ENVIRONMENT, UsageError
from shoal.journal.suggested import command

_MARKS = {"good": "ok  ", "note": "note", "bad": "BAD "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("invite", metavar="INVITE", help="an invitation: @FILE, - for the input, or the line itself")
    parser.add_argument("--json", action="store_true", help="a list of objects, for programs")
    add_peer(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.journal.rundir import RunDir, workspace
    from shoal.spec.run import NAME_PATTERN
    from shoal.swarm.config import NodeConfig, folder_of
    from shoal.swarm.control import running
    from shoal.swarm.doctor import examine

    invitation = read_line(args.invite)
    if not re.match(NAME_PATTERN, invitation.name):
        raise UsageError(f"the invitation is for a run called {invitation.name!r}, which is no name of a run.")
    run_dir = RunDir.of(invitation.name, workspace(args.workspace))
    config = settled(NodeConfig(folder_of(run_dir)), args)
    if running(config):
        raise UsageError(f"this peer is running; {command('swarm status', run_dir)} shows its links.")
    relays = (*config.relays, *(url for address in invitation.peers.values() for url in address.relays))
    found = asyncio.run(examine(invitation, replace(config, relays=tuple(dict.fromkeys(relays))[:4])))
    if args.json:
        print(json.dumps([asdict(f) for f in found], indent=2))
    else:
        for one in found:
            print(f"{_MARKS[one.level]}  {one.about}: {one.text}")
    bad = [f for f in found if f.level == "bad"]
    reached = any(f.about == "peer" and f.level == "good" for f in found)
    return WRONG_ENVIRONMENT if bad and not reached else DONE
