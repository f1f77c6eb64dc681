"""A peer of a model that is cut over peers (`swarm.stages`), with peers that a file names. `shoal swarm create` and
`join` are the way for people; this is the layer below, for benchmarks and to try a cut out on one machine.

    python -m shoal.stages local RUN.yaml --counts 1,2,1 --folder FOLDER      all peers on this machine
    python -m shoal.stages key peer.key                                       makes a key, prints its id
    python -m shoal.stages run RUN.yaml --peers PEERS.json --key peer.key --folder FOLDER

PEERS.json says who holds what, stage by stage: [[{"id": "…", "tcp": ["host:port"]}, …], …]. Of a peer behind a NAT it
names relays (`shoal swarm relay`) instead: {"id": "…", "relays": ["http://host:3340"]}. A peer may be started before
the others, killed, and started again with the same folder.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import torch

from shoal import wire
from shoal.decide.checks import trainable
from shoal.decide.length import with_steps
from shoal.decide.load import load
from shoal.errors import SpecError
from shoal.guard.begin import write_spec
from shoal.journal.rundir import RunDir
from shoal.leaving import exit_code
from shoal.net.api import Address, Event, PeerId
from shoal.net.endpoint import connect
from shoal.net.identity import Identity
from shoal.net.relay_url import MOST_RELAYS, is_relay
from shoal.plain_file import read_plain
from shoal.spec.cut import MOST_PEERS
from shoal.spec.duration import seconds
from shoal.spec.run import Run
from shoal.spec.start_values import with_rule
from shoal.stages.layers import StageLayers
from shoal.stages.local import run_here
from shoal.stages.routes import Layout
from shoal.stages.training import End, journaled, peer_of, take_steps
from shoal.stages.work import Work
from shoal.streams import steady
from shoal.values import BadValue, items, name, read_json, shown, table, text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.stages", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    key = verbs.add_parser("key", help="make a key")
    key.add_argument("file", type=Path)
    run = verbs.add_parser("run", help="train")
    run.add_argument("file", type=Path, metavar="RUN.yaml")
    run.add_argument("--peers", type=Path, required=True, metavar="PEERS.json")
    run.add_argument("--key", type=Path, required=True)
    run.add_argument("--folder", type=Path, required=True, help="where the journal and the saved states are")
    run.add_argument(
        "--listen", default="", metavar="HOST:PORT", help="the first of its addresses without this, if it has one"
    )
    local = verbs.add_parser("local", help="all peers on this machine, to try it out")
    local.add_argument("file", type=Path, metavar="RUN.yaml")
    local.add_argument("--counts", type=_counts, required=True, help="peers of each stage, such as 1,2,1")
    local.add_argument("--folder", type=Path, required=True)
    args, overrides = parser.parse_known_args(argv)
    if args.verb == "key":
        print(Identity.at(args.file).id)
        return 0
    if args.verb == "local":
        more = [f"swarm.stages.count={len(args.counts)}", "swarm.peers=2", *overrides]  # the counts say how many
        return exit_code(lambda: run_here(args.file, args.counts, args.folder, more))
    return exit_code(lambda: _run(args, overrides))


def _counts(text: str) -> list[int]:
    counts = text.split(",")
    if not all(n.isdecimal() and int(n) > 0 for n in counts):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of how many peers each stage has, such as 1,2,1")
    return [int(n) for n in counts]


def _run(args: argparse.Namespace, overrides: list[str]) -> int:
    spec = load(args.file, overrides).run
    trainable(spec, "stages")
    spec = with_steps(spec, args.folder)
    spec = spec.model_copy(update={"model": with_rule(spec.model, spec.train.optimizer.name)})
    identity = Identity.load(args.key)
    layout, addresses = peers_of(args.peers, spec)
    stage = next((s for s, peers in enumerate(layout) if identity.id in peers), None)
    if stage is None:
        raise SpecError(f"{args.peers} does not name the key {args.key}, whose id is {identity.id}.")
    torch.set_num_threads(1 if spec.resources.threads == "auto" else spec.resources.threads)
    cuda = spec.resources.device == "cuda" or (spec.resources.device == "auto" and torch.cuda.is_available())
    at = (args.listen, *addresses[identity.id].tcp) if args.listen else addresses[identity.id].tcp
    host, port = wire.address_of(at[0]) if at else ("", 0)
    run_dir = RunDir(args.folder)
    if args.file.resolve() != run_dir.spec_file.resolve():
        run_dir.path.mkdir(parents=True, exist_ok=True)
        write_spec(run_dir, spec)
    with journaled(args.folder, spec.steps) as event:
        work = StageLayers(spec, stage, args.folder, torch.device("cuda" if cuda else "cpu"), event)
        asyncio.run(train(spec, identity, layout, addresses, work, event, host, port, work.fingerprint))
    return 0


def peers_of(file: Path, spec: Run) -> tuple[Layout, dict[PeerId, Address]]:
    try:
        stages = [items(stage, MOST_PEERS) for stage in items(read_json(read_plain(file, 1 << 24)), MOST_PEERS)]
        found = [[_peer(peer) for peer in stage] for stage in stages]
        layout = tuple(tuple(peer for peer, _ in stage) for stage in found)
        addresses = {peer: address for stage in found for peer, address in stage}
    except (OSError, BadValue) as e:
        raise SpecError(f"{file} is no list of stages, each a list of peers with id and tcp or relays ({e}).") from e
    if len(layout) != spec.swarm.stages.count or not all(layout):
        raise SpecError(
            f"{file} has {len(layout)} stages and swarm.stages.count says {spec.swarm.stages.count}; "
            "each stage needs a peer at least."
        )
    return layout, addresses


def _peer(said: object) -> tuple[PeerId, Address]:
    s = table(said, 64)
    parts = {part: tuple(text(one, 256) for one in items(s.get(part, []), 16)) for part in ("relays", "direct", "tcp")}
    if not any(parts.values()):
        raise BadValue("a peer without an address")
    for url in parts["relays"]:
        if not is_relay(url):
            raise BadValue(f"a relay is an address such as http://relay.example.org:3340, not {shown(url)}")
    return name(s.get("id")), Address(**parts)


def _own_first(me: PeerId, addresses: dict[PeerId, Address]) -> list[Address]:
    """A peer is found at its own relays; it reaches others through theirs."""
    return [addresses[me], *addresses.values()]


async def train(
    spec: Run,
    identity: Identity,
    layout: Layout,
    addresses: dict[PeerId, Address],
    work: Work,
    event: Event,
    host: str,
    port: int,
    fingerprint: str = "",
) -> None:
    """Until the last step counts, or until told to stop: what is saved then is of the last step that counted."""
    silent_s = seconds(spec.swarm.silent)
    relays = tuple(dict.fromkeys(url for address in _own_first(identity.id, addresses) for url in address.relays))
    far = any(address.relays or address.direct for address in addresses.values())  # else TCP alone, and no iroh
    options: dict[str, Any] = {"host": host, "port": port, "quic": far, "relays": relays[:MOST_RELAYS]}
    endpoint = connect(identity, lambda peer, proof: peer in addresses, event, silent_s=silent_s, **options)
    await endpoint.start()
    try:
        for other, address in addresses.items():
            endpoint.know(other, address)
        await take_steps(peer_of(spec, endpoint, layout, work, event, fingerprint), End())
    finally:
        await endpoint.close()


if __name__ == "__main__":
    steady()
    sys.exit(main(sys.argv[1:]))
