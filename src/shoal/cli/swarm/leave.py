"""Ends this peer with a word to the others, who go on without it. `shoal swarm join RUN` comes back.

Of a model that is cut over peers, the others wait where nobody else has this peer's layers.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace
from shoal.cli.swarm.shared import find, free
from shoal.errors import TransientError
from shoal.journal.suggested import command

if TYPE_CHECKING:
    from shoal.swarm.config import NodeConfig

PATIENCE_S = 90.0  # a step is finished first, and its part handed in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's name")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.swarm.control import running, tell

    config = find(args.run, args.workspace)
    if running(config):
        tell(config, "leave")
        until = time.monotonic() + PATIENCE_S
        while running(config):
            if time.monotonic() > until:
                raise TransientError(
                    f"the node has not ended within {PATIENCE_S:g} s of being told to; "
                    f"{command('swarm status', config.run_dir)} shows what it does."
                )
            time.sleep(0.2)
        print(f"left; {_then(config)}")
        return 0
    heard = asyncio.run(_goodbye(free(config)))
    print(f"left; {heard} peer{'s were' if heard != 1 else ' was'} told" if heard else "left; nobody was there to tell")
    return 0


def _then(config: NodeConfig) -> str:
    from shoal.swarm.charter import Charter

    if Charter.load(config.charter_file).stages == 1:
        return "the others go on"
    back = command("swarm join", config.run_dir)
    return f"its siblings go on; where its stage has no other peer all wait until {back} brings it back"


async def _goodbye(config: NodeConfig) -> int:
    from shoal.net.identity import Identity
    from shoal.swarm.enter import Heard, visit
    from shoal.swarm.roster import Roster

    heard = Heard()
    roster = Roster.load(config.roster_file, Identity.load(config.identity_file), heard)
    if not roster.others():
        roster.announce(left=True)
        return 0
    async with visit(config, roster, heard) as (endpoint, gossip):
        for _ in range(30):
            if any(link.way is not None for link in endpoint.links().values()):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.3)  # for a few more
        told = sum(link.way is not None for link in endpoint.links().values())
        await gossip.leave()
        await asyncio.sleep(0.5)
    return told
