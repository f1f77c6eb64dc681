"""How a newcomer gets in: it greets the peers that its invitation names, asks for the charter, and fetches what it has
not got. Also short visits for commands that have something to say while no node runs."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import DataError, SetupError, ShoalError, TransientError
from shoal.net.api import Address, Endpoint, Event, Message, PeerId, Refused, Unreachable
from shoal.net.endpoint import SILENT_S, Peers, connect
from shoal.net.identity import Identity
from shoal.readable import size
from shoal.swarm.blobs import Blobs
from shoal.swarm.charter import INPUTS, MOST_CHARTER, Charter, Input, Where, covers, find_input
from shoal.swarm.config import NodeConfig
from shoal.swarm.gossip import CHARTER, Gossip
from shoal.swarm.invite import Invitation
from shoal.swarm.roster import Roster

REACH_S = 30.0  # for any of the invitation's peers to answer
Say = Callable[[str], None]
Agree = Callable[[Charter, int], Awaitable[bool]]


@dataclass
class Heard:
    """Events of a visit, for somebody who wants to know why it failed."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] in kinds]


def endpoint_of(config: NodeConfig, roster: Roster, event: Event, silent_s: float = SILENT_S) -> Peers:
    """As this peer's configuration has it; not started."""
    return connect(
        roster.me,
        roster.admit,
        event,
        proof=roster.proof,
        relays=config.relays,
        host=config.host,
        port=config.port,
        quic=not config.tcp_only,
        silent_s=silent_s,
    )


@asynccontextmanager
async def visit(
    config: NodeConfig, roster: Roster, event: Event, charter: bytes = b""
) -> AsyncIterator[tuple[Endpoint, Gossip]]:
    """An endpoint of this peer for a while, with gossip."""
    endpoint = endpoint_of(config, roster, event)
    await endpoint.start()
    try:
        gossip = Gossip(roster, endpoint, event, charter=charter)
        talk = asyncio.create_task(gossip.run())
        try:
            yield endpoint, gossip
        finally:
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
    finally:
        await endpoint.close()


def newcomer(invitation: Invitation, config: NodeConfig, event: Event) -> Roster:
    """The roster of somebody who has only an invitation; of somebody who was in before, what it had."""
    me = Identity.at(config.identity_file)
    if config.roster_file.exists():
        roster = Roster.load(config.roster_file, me, event)
        if roster.swarm != invitation.swarm:
            raise SetupError(
                f"{config.folder} belongs to another swarm; choose another folder with --workspace, or delete it."
            )
        own = roster.entry(me.id)
        if own is not None and own.admission.invite not in (None, invitation.id):
            roster.readmit(invitation.admit(me.id))
        roster.announce(name=config.name)
    else:
        roster = Roster(
            invitation.swarm,
            invitation.ticket.organiser,
            me,
            invitation.admit(me.id),
            name=config.name,
            file=config.roster_file,
            event=event,
        )
    roster.trust(invitation.peers)
    return roster


async def enter(
    invitation: Invitation,
    config: NodeConfig,
    look_in: list[Path],
    say: Say,
    allowed: Sequence[str] = (),
    agree: Agree | None = None,
) -> dict[str, Where] | None:
    """Gets the charter and all that the run reads onto this machine; returns where each input is. What is written is
    enough for a node to start without the invitation. `look_in` are folders whose data sets may be used, `allowed`
    addresses of stores that may be read with this machine's credentials. `agree` sees the charter before anything else
    happens, with how many peers are known; None: it did not."""
    agree = agree or _at_once
    heard = Heard()
    roster = newcomer(invitation, config, heard)
    async with visit(config, roster, heard) as (endpoint, gossip):
        for peer, address in invitation.peers.items():
            endpoint.know(peer, address)
        peer, data = await _charter(invitation, endpoint, heard, gossip)
        charter = Charter.of(data, invitation.swarm)
        if charter.organiser != invitation.ticket.organiser or charter.name != invitation.name:
            raise SetupError("the invitation and the swarm name different organisers or runs; ask for another.")
        say(f"reached {roster.name(peer)}: run {charter.name}, {len(roster.members())} peers known")
        with contextlib.suppress(Unreachable, Refused):
            await gossip.ask(peer)
        agreed = False
        try:
            agreed = await agree(charter, len(roster.members()) - 1)
        finally:
            if not agreed:
                await only_looked(gossip)
        if not agreed:
            return None
        _room(charter, config)
        config.charter_file.write_bytes(data)
        blobs = Blobs(config.blobs, endpoint, heard)
        try:
            return {i.place: await _bring(i, config, blobs, roster, look_in, say, allowed) for i in charter.inputs}
        finally:
            await blobs.close()


async def _at_once(charter: Charter, peers: int) -> bool:
    return True


async def only_looked(gossip: Gossip) -> None:
    """Nobody should wait for a machine that goes away again."""
    await gossip.leave()
    await asyncio.sleep(0.2)  # for the word to get out


async def _charter(invitation: Invitation, endpoint: Endpoint, heard: Heard, gossip: Gossip) -> tuple[PeerId, bytes]:
    """From the first peer that answers with the true one."""

    async def one(peer: PeerId) -> tuple[PeerId, bytes]:
        said = await endpoint.ask(peer, Message(CHARTER), REACH_S, MOST_CHARTER)
        Charter.of(bytes(said.body), invitation.swarm)
        return peer, bytes(said.body)

    tasks = {asyncio.create_task(one(peer)) for peer in invitation.peers}
    denied = asyncio.create_task(_denied(invitation, heard))
    wrong: ShoalError | None = None
    try:
        while tasks and not denied.done():
            await asyncio.wait({*tasks, denied}, return_when=asyncio.FIRST_COMPLETED)
            for task in [t for t in tasks if t.done()]:
                tasks.discard(task)
                try:
                    return task.result()
                except (Unreachable, Refused):
                    continue
                except ShoalError as e:
                    wrong = e
    finally:
        denied.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, denied, return_exceptions=True)
    raise wrong or _nobody(invitation, heard)


async def _denied(invitation: Invitation, heard: Heard) -> None:
    """Ends when every peer that the invitation names has said no: there is nothing to wait for then."""
    while not {e["peer"] for e in heard.of("link_denied")} >= invitation.peers.keys():
        await asyncio.sleep(0.1)


def _nobody(invitation: Invitation, heard: Heard) -> ShoalError:
    count = len(invitation.peers)
    peers = "the peer" if count == 1 else f"the {count} peers"
    if not count:
        return SetupError("the invitation names no peer; ask somebody in the swarm for `shoal swarm invite`.")
    if denials := {e["reason"] for e in heard.of("link_denied")}:
        late = " (by this machine's clock the invitation has expired)" if invitation.expired() else ""
        return SetupError(
            f"{peers} of the invitation refused it: {', '.join(sorted(denials))}{late}; ask for a new invitation."
        )
    late = "the invitation has expired by this machine's clock, and " if invitation.expired() else ""
    return TransientError(
        f"{late}none of {peers} that the invitation names has answered within {REACH_S:g} s; "
        "`shoal swarm doctor INVITE` says why, or ask for a line with newer addresses (`shoal swarm invite`)."
    )


def _room(charter: Charter, config: NodeConfig) -> None:
    """A charter may propose more data than this machine can hold."""
    free = shutil.disk_usage(config.folder).free
    lacking = [i for i in charter.inputs if i.folder and not (config.run_dir.path / i.place).is_dir()]
    if (needed := sum(i.bytes for i in lacking)) > free:
        raise SetupError(f"the swarm's data is {size(needed)}, and {config.folder} has room for {size(free)}.")


async def _bring(
    wanted: Input,
    config: NodeConfig,
    blobs: Blobs,
    roster: Roster,
    look_in: list[Path],
    say: Say,
    allowed: Sequence[str],
) -> Where:
    if wanted.address:
        if not any(covers(one, wanted.address) for one in allowed):
            raise SetupError(
                f"the swarm reads {wanted.address}, for which this machine's credentials would be used: "
                f"join again with --allow {wanted.address} if that is what you want."
            )
        say(f"reads {wanted.address}, which you allow")
        return wanted.address
    into = _below(config.run_dir.path, wanted.place)
    if into.is_dir():  # of an earlier attempt; it appears when it is complete
        return into
    if (there := await asyncio.to_thread(find_input, wanted, look_in)) is not None:
        say(f"uses {there} for {wanted.place}: the same data set")
        return there
    if not wanted.folder:
        raise DataError(
            f"peers of this swarm bring their data themselves: get the data set {wanted.fingerprint[:16]} "
            "and name its folder with --data."
        )
    say(f"fetches {wanted.place}, {size(wanted.bytes)}, from the peers")
    sources = [peer for peer in roster.members() if peer != roster.me.id]
    return await blobs.fetch_folder(wanted.folder, wanted.manifest_bytes, sources, into, most_bytes=wanted.bytes)


def _below(folder: Path, place: str) -> Path:
    """Where an input is kept: below the run's own folder, also when every link on the way is followed."""
    into = folder / place
    if not into.resolve().is_relative_to(folder.resolve() / INPUTS):
        raise SetupError(f"{into} leads out of {folder / INPUTS} by a link; remove it, or choose another --workspace.")
    return into


async def address_now(config: NodeConfig, roster: Roster, wait_s: float = 3.0) -> tuple[Address, int]:
    """Where this peer can be found, and its port: an endpoint is opened, asks its relays, and is closed again."""
    heard = Heard()
    async with visit(config, roster, heard) as (endpoint, _):
        relays = set(config.relays)
        for _ in range(int(wait_s / 0.1)):
            if {e.get("at") for e in heard.of("relay_up")} >= relays and (
                not relays or heard.of("address_seen", "relay_down")
            ):
                break
            await asyncio.sleep(0.1)
        address = endpoint.address()
        port = int(address.tcp[0].rpartition(":")[2]) if address.tcp else 0
        return address, port
