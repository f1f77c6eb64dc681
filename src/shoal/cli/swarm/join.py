"""Enters a swarm by an invitation, or starts a peer again that was in before; then trains.

What the swarm asks this machine to run, read, write and send is printed first; on a terminal it is asked whether to go
on. Only values that a swarm must have alike come from it; everything else is this machine's own, as in
`shoal swarm join @invitation resources.device=cpu track.mlflow=false`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.swarm.shared import add_peer, find, free, is_line, keep, read_line, refuse_helpers, settled, start
from shoal.errors import SetupError, UsageError
from shoal.journal.suggested import command

if TYPE_CHECKING:
    from shoal.spec import Run
    from shoal.swarm.charter import Charter, Where
    from shoal.swarm.config import NodeConfig
    from shoal.swarm.invite import Invitation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "invite",
        metavar="INVITE|RUN",
        help="an invitation: @FILE that holds it, - for the input, or the line itself; or a run's name",
    )
    parser.add_argument(
        "--data", action="append", default=[], metavar="DIR", help="where the data set may be already; several"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="s3://bucket/prefix that the swarm may have read with this machine's credentials; several",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what joining would do, and do nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--no-start", action="store_true", help="get everything, and start nothing")
    add_peer(parser)


def run(args: argparse.Namespace) -> int:
    if not is_line(args.invite):
        return _again(args)
    from shoal.journal.rundir import RunDir, workspace
    from shoal.spec.run import NAME_PATTERN
    from shoal.swarm.config import NodeConfig, folder_of
    from shoal.swarm.control import running

    invitation = read_line(args.invite)
    if not re.match(NAME_PATTERN, invitation.name):
        raise UsageError(f"the invitation is for a run called {invitation.name!r}, which is no name of a run.")
    run_dir = RunDir.of(invitation.name, workspace(args.workspace))
    config = NodeConfig(folder_of(run_dir))
    if run_dir.exists() and not config.folder.exists():
        raise UsageError(f"there is a run '{invitation.name}' already, which is no swarm; choose another --workspace.")
    if running(config):
        raise UsageError(f"this peer is running already; {command('swarm status', run_dir)} shows it.")
    config = settled(NodeConfig.load(config.folder) if config.settings_file.exists() else config, args)
    relays = (*config.relays, *(url for address in invitation.peers.values() for url in address.relays))
    config = replace(config, relays=tuple(dict.fromkeys(relays))[:4])
    if args.dry_run:
        return _look(args, invitation, config)
    if not _enter(args, invitation, config):
        return 0
    if args.no_start:
        print(f"{command('swarm join', run_dir)} starts this peer")
        return 0
    print(f"{command('swarm status', run_dir)} shows who is in, {command('swarm leave', run_dir)} ends it", flush=True)
    return start(config)


def _enter(args: argparse.Namespace, invitation: Invitation, config: NodeConfig) -> bool:
    from shoal.guard.begin import write_spec, writing
    from shoal.swarm.charter import Charter
    from shoal.swarm.enter import enter

    run_dir, new = config.run_dir, not config.run_dir.path.exists()

    async def agree(charter: Charter, peers: int) -> bool:
        _show(args, charter, config, peers)
        return args.yes or not _on_a_terminal() or await _asked()

    with writing(run_dir):
        at = asyncio.run(enter(invitation, free(config), _folders(args), _say, args.allow, agree))
        if at is None:
            if new:
                shutil.rmtree(run_dir.path, ignore_errors=True)
            print("nothing was joined")
            return False
        charter = Charter.load(config.charter_file)
        write_spec(run_dir, _sized(charter.local(run_dir.spec_file, at, args.overrides), at))
        keep(config, invitation)
        config.save()
    return True


def _look(args: argparse.Namespace, invitation: Invitation, config: NodeConfig) -> int:
    """Nothing is left of it, here or with the peers."""
    from shoal.swarm.enter import enter

    async def agree(charter: Charter, peers: int) -> bool:
        _show(args, charter, config, peers)
        return False

    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        there = Path(folder) / "runs" / invitation.name / "swarm"
        asyncio.run(enter(invitation, free(replace(config, folder=there)), [], _say, agree=agree))
    return 0


def _show(args: argparse.Namespace, charter: Charter, config: NodeConfig, peers: int) -> None:
    """Also refuses, before anything is fetched, what this peer asked for and cannot have."""
    from shoal.decide.checks import trainable
    from shoal.spec.drivers import swarm_driver_of
    from shoal.swarm.charter import covers, find_input
    from shoal.swarm.summary import lines

    here: dict[str, Where] = {}
    for one in charter.inputs:
        if any(covers(allowed, one.address) for allowed in args.allow if one.address):
            here[one.place] = one.address
        elif (found := find_input(one, _folders(args))) is not None:
            here[one.place] = found
    run = charter.local(config.run, here, args.overrides)
    trainable(run, swarm_driver_of(run))
    refuse_helpers(config, charter.stages)
    for line in lines(charter, run, config, peers, here):
        _say(line)


def _sized(run: Run, at: dict[str, Where]) -> Run:
    """How large the model is may be known only now: the vocabulary is the data's."""
    from shoal.swarm.charter import vocabulary
    from shoal.swarm.proposal import Unfit, bounded_with

    words = [w for one in at.values() if isinstance(one, Path) and (w := vocabulary(one)) is not None]
    try:
        bounded_with(run, max([1, *words]))
    except Unfit as e:
        raise SetupError(f"the swarm's data is refused: {e}.") from None
    return run


def _folders(args: argparse.Namespace) -> list[Path]:
    return [Path(p).expanduser().resolve() for p in args.data]


def _on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


async def _asked() -> bool:
    """While the person thinks, the links stay up."""
    print("join? [y/N] ", end="", flush=True)
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _say(text: str) -> None:
    print(text, flush=True)


def _again(args: argparse.Namespace) -> int:
    """A peer that was in before needs no invitation."""
    if args.data or args.overrides or args.allow or args.dry_run:
        raise UsageError(
            "--data, --allow, --dry-run and values of the run file go with an invitation; "
            "`shoal swarm join RUN` takes none."
        )
    config = settled(find(args.invite, args.workspace), args)
    if not config.run.exists():
        raise UsageError(f"{config.run} is not there: this peer has never got in; join with the invitation again.")
    config.save()
    if args.no_start:
        return 0
    return start(config)
