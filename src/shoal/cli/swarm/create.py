"""Makes a swarm of a run file: an organiser's key, the charter that all peers go by, an invitation. Then trains."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace

from shoal.cli.swarm.shared import add_peer, keep, refuse_helpers, settled, start
from shoal.errors import UsageError
from shoal.journal.suggested import command
from shoal.readable import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUN.yaml", help="the run file; its section `swarm` says how peers exchange")
    add_expires(parser)
    parser.add_argument("--no-data", action="store_true", help="peers bring their data; it is not served from here")
    parser.add_argument("--no-start", action="store_true", help="only make it: `shoal swarm join RUN` starts this peer")
    parser.add_argument("--json", action="store_true", help="what was made as an object, for programs")
    add_peer(parser)


def add_expires(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expires", default="30 d", metavar="TIME", help="how long the invitation is good, as in 12h or 30d (default)"
    )


def expiry(text: str) -> float:
    from shoal.spec.duration import seconds

    try:
        return time.time() + seconds(text)
    except ValueError:
        raise UsageError(f"--expires {text}: give a time such as 12h or 30d, at most a year.") from None


def run(args: argparse.Namespace) -> int:
    from shoal.decide.checks import local_inputs, trainable
    from shoal.decide.length import with_steps
    from shoal.decide.load import load
    from shoal.guard.begin import write_spec, writing
    from shoal.journal.rundir import RunDir, workspace
    from shoal.net.identity import Identity
    from shoal.spec.drivers import swarm_driver_of
    from shoal.swarm.blob_folder import add_folder
    from shoal.swarm.blob_store import Store
    from shoal.swarm.charter import write_charter
    from shoal.swarm.config import NodeConfig, folder_of
    from shoal.swarm.enter import address_now
    from shoal.swarm.invite import Admission, Invitation
    from shoal.swarm.roster import Roster

    expires = expiry(args.expires)
    spec = load(args.file, args.overrides).run
    trainable(spec, swarm_driver_of(spec))
    local_inputs(spec)
    spec = with_steps(spec, workspace(args.workspace))  # all peers go by the same number
    run_dir = RunDir.of(spec.name, workspace(args.workspace))
    config = settled(NodeConfig(folder_of(run_dir)), args)
    refuse_helpers(config, spec.swarm.stages.count)
    if config.charter_file.exists():
        raise UsageError(
            f"run {spec.name} is a swarm already: {command('swarm join', run_dir)} starts this peer again, "
            f"{command('swarm invite', run_dir)} prints an invitation, name=OTHER makes another swarm."
        )
    if run_dir.exists():
        raise UsageError(f"there is a run '{spec.name}' already, which is no swarm; name=OTHER makes one beside it.")
    with writing(run_dir):
        organiser, me = Identity.at(config.organiser_file), Identity.at(config.identity_file)
        store = Store(config.blobs)
        charter, at = write_charter(
            spec,
            organiser.id,
            None if args.no_data else lambda folder: add_folder(store, folder, outside=True),
        )
        swarm = charter.swarm
        roster = Roster(
            swarm,
            organiser.id,
            me,
            Admission.direct(swarm, me.id, organiser),
            name=config.name,
            file=config.roster_file,
        )
        address, port = asyncio.run(address_now(config, roster))
        config = replace(config, port=port)
        roster.announce(address)
        invitation = Invitation.new(swarm, organiser, spec.name, expires, {me.id: address})
        keep(config, invitation)
        write_spec(run_dir, charter.founded(spec) if charter.stages > 1 else spec)
        config.save()
        config.charter_file.write_bytes(charter.to_bytes())  # last: now it is a swarm
    if args.json:
        made = {"swarm": swarm, "run": spec.name, "folder": str(config.folder), "peer": me.id, "invite": invitation.id}
        print(json.dumps({**made, "invitation": invitation.line(), "expires": invitation.ticket.expires}), flush=True)
    else:
        data = sum(i.bytes for i in charter.inputs)
        served = "which peers bring themselves" if args.no_data else f"served to peers that lack it ({size(data)})"
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(invitation.ticket.expires))
        print(f"swarm {spec.name} ({swarm[:12]}), with its data, {served}" if at else f"swarm {spec.name}")
        if charter.stages > 1:
            print(f"its model is cut into {charter.stages} stages; the first step waits for {spec.swarm.peers} peers")
        print(f"whoever has this line can join until {until}; on another machine:\n")
        print(f"shoal swarm join {invitation.line()}\n")
        print("`shoal swarm join -` or `@FILE` takes the line from the input or a file: it is a password")
        if not (address.relays or config.tcp_only):
            print(
                "no --relay: peers behind NATs may not reach this machine (`shoal swarm relay` on a public one helps)"
            )
        print(f"{command('swarm status', run_dir)} shows who is in", flush=True)
    if args.no_start:
        return 0
    return start(config)
