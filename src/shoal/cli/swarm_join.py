"""Enters a swarm by an invitation, or starts a peer again that was in before; then trains."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from shoal.cli.swarm_shared import add_peer, find, free, is_line, keep, read_line, settled
from shoal.errors import UsageError
from shoal.observe.commands import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "invite", metavar="INVITE|RUN", help="the line of an invitation, - to read it from the input, or a run's name"
    )
    parser.add_argument(
        "--data", action="append", default=[], metavar="DIR", help="where the data set may be already; several"
    )
    parser.add_argument("--no-start", action="store_true", help="get everything, and start nothing")
    add_peer(parser)


def run(args: argparse.Namespace) -> int:
    if not is_line(args.invite):
        return _again(args)
    from shoal.fleet.swarm.charter import Charter
    from shoal.fleet.swarm.config import NodeConfig, folder_of
    from shoal.fleet.swarm.control import running
    from shoal.fleet.swarm.enter import enter
    from shoal.guard.begin import write_spec, writing
    from shoal.spec.run import NAME_PATTERN
    from shoal.track.rundir import RunDir, workspace

    invitation = read_line(args.invite)
    if not re.match(NAME_PATTERN, invitation.name):
        raise UsageError(f"the invitation is for a run called {invitation.name!r}, which is no name of a run.")
    folder = workspace(args.workspace)
    run_dir = RunDir.of(invitation.name, folder)
    config = NodeConfig(folder_of(run_dir))
    if run_dir.exists() and not config.folder.exists():
        raise UsageError(f"there is a run '{invitation.name}' already, which is no swarm; choose another --workspace.")
    if running(config):
        raise UsageError(f"this peer is running already; {command('swarm status', run_dir)} shows it.")
    config = settled(NodeConfig.load(config.folder) if config.settings_file.exists() else config, args)
    relays = (*config.relays, *(url for address in invitation.peers.values() for url in address.relays))
    config = NodeConfig(**{**vars(config), "relays": tuple(dict.fromkeys(relays))[:4]})
    look_in = [Path(p).resolve() for p in args.data] or [Path.cwd(), Path.cwd() / "data", folder, folder / "data"]
    with writing(run_dir):
        at = asyncio.run(enter(invitation, free(config), look_in, lambda text: print(text, flush=True)))
        charter = Charter.load(config.charter_file)
        write_spec(run_dir, charter.local(run_dir.spec_file, at, args.overrides))
        keep(config, invitation)
        config.save()
    if args.no_start:
        print(f"{command('swarm join', run_dir)} starts this peer")
        return 0
    print(f"{command('swarm status', run_dir)} shows who is in, {command('swarm leave', run_dir)} ends it", flush=True)
    from shoal.fleet.swarm.start import run_node

    return run_node(free(config))


def _again(args: argparse.Namespace) -> int:
    """A peer that was in before needs no invitation."""
    if args.data or args.overrides:
        raise UsageError("--data and values of the run file go with an invitation; `shoal swarm join RUN` takes none.")
    config = settled(find(args.invite, args.workspace), args)
    if not config.run.exists():
        raise UsageError(f"{config.run} is not there: this peer has never got in; join with the invitation again.")
    config.save()
    if args.no_start:
        return 0
    from shoal.fleet.swarm.start import run_node

    return run_node(free(config))
