"""One peer's end of all its links: finds a way to each peer it knows, keeps it alive, and changes it when it breaks.

Ways, best first: TCP (straight, whoever of the two can be dialed), QUIC straight to the peer (through a punched hole),
QUIC through a relay. A worse way is used at once when it is there first, and left when a better one is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal import wire
from shoal.net import tcp
from shoal.net.api import (
    MOST_PROOF,
    Address,
    Admit,
    Event,
    Handler,
    LinkState,
    Message,
    PeerId,
    Proof,
    Refused,
    Unreachable,
    Way,
)
from shoal.net.carrier import Budget, Carrier
from shoal.net.identity import Identity, is_peer
from shoal.net.link_journal import Limited
from shoal.net.peer import RANK, Peer
from shoal.net.pipe import Greeting, Pipe
from shoal.net.secure import Proven, SecurePipe
from shoal.net.seek import ALREADY, Seeker
from shoal.net.tasks import FOR_EVER, Tasks, words

if TYPE_CHECKING:
    from shoal.net.quic import Quic

HEARTBEAT_S = 1.0
SUSPECT_S = 2.5  # a connection that is not heard of for so long: another way is looked for
STUCK_S = 3.2  # QUIC: it is given up, if a relay could carry it instead
SILENT_S = 5.0  # and for so long: it is given up
SIMULTANEOUS_S = 5.0  # two connections dialed by either side within this are one intention
HELD_BYTES = 256 << 20  # of bodies that others have announced
HELD_BY_ONE = 96 << 20  # of them, those of one peer
MOST_CARRIERS = 16  # of one peer: old ones that end, and new ones by several ways
MOST_BULK = 32  # connections for bulk of one carrier


def connect(
    identity: Identity,
    admit: Admit,
    event: Event | None = None,
    *,
    proof: Proof = bytes,
    relays: Iterable[str] = (),
    host: str = "",
    port: int = 0,
    quic: bool = True,
    tcp_through_nats: bool = True,
    stripes: tuple[int, int] = (4, 8),
    congestion: str = "bbr",
    silent_s: float = SILENT_S,
) -> Peers:
    """The endpoint of this process; `start` it. `quic=False`: TCP alone, for one machine or one network. `stripes`:
    connections for bulk, of TCP and of QUIC."""
    given = event or _nobody_listens
    how = How(tuple(relays), host, port, quic, quic and tcp_through_nats, stripes, congestion, silent_s)
    return Peers(identity, admit, given, proof, how)


@dataclass(frozen=True)
class How:
    relays: tuple[str, ...]
    host: str
    port: int
    quic: bool
    punch: bool
    stripes: tuple[int, int]
    congestion: str
    silent_s: float


def _nobody_listens(kind: str, **fields: Any) -> None:
    pass


class Peers:
    """Implements `api.Endpoint`."""

    def __init__(self, identity: Identity, admit: Admit, event: Event, proof: Proof, how: How) -> None:
        self.id: PeerId = identity.id
        self.budget = Budget(HELD_BYTES, HELD_BY_ONE)
        self.me, self._admit, self._proof, self.event = identity, admit, proof, Limited(event)
        self.how = how
        self._boot = secrets.token_hex(8)
        self.listener = tcp.Listener(identity, self._welcome, self._on_tcp, self._on_stranger, how.congestion)
        self.quic: Quic | None = None
        self._handlers: dict[str, tuple[Handler, int]] = {}
        self._peers: dict[PeerId, Peer] = {}
        self._banned: set[PeerId] = set()
        self.tasks = Tasks(self._journaled, lambda name, e: self._journaled("task-failed", task=name, text=words(e)))
        self._seen_hosts: list[str] = []  # this machine's, as others see them
        self._closed = False
        self._seeker = Seeker(self)

    # api.Endpoint

    async def start(self) -> None:
        await self.listener.start(self.how.host, self.how.port)
        if self.how.quic:
            from shoal.net.quic import Quic

            self.quic = Quic(self.me, self.how.relays, self.how.host, self.how.port, self.event, self._proof)
            await self.quic.start(self._welcome, self._on_quic)
        self.tasks.keep("the heartbeat of links", self._heartbeat, borne=FOR_EVER)
        here, control = self.address(), tcp.congestion_control(self.how.congestion)
        self.event("net_up", tcp=list(here.tcp), direct=list(here.direct), relays=list(here.relays), congestion=control)

    async def close(self) -> None:
        self._closed = True
        carriers = [c for p in self._peers.values() for c in p.carriers]
        for peer in self._peers.values():
            for keeper in peer.keepers:
                keeper.cancel()
        await asyncio.gather(*(c.farewell("it is leaving") for c in carriers))
        await self.tasks.close()
        await self.listener.close()
        if self.quic is not None:
            await self.quic.close()

    def address(self) -> Address:
        port = self.listener.port
        host = self.how.host
        hosts = [host] if host not in ("", "0.0.0.0", "::") else [*tcp.own_hosts(), *self._seen_hosts]
        at = tuple(dict.fromkeys(wire.text_of((h, port)) for h in hosts if h)) if port else ()
        if self.quic is None:
            return Address((), (), at[:16])
        return Address(self.quic.relays(), self.quic.direct()[:16], at[:16])

    def on(self, kind: str, handler: Handler, most_body: int = 1 << 20) -> None:
        self._handlers[kind] = handler, most_body

    def know(self, peer: PeerId, address: Address) -> None:
        if not is_peer(peer) or peer == self.id:
            return
        self._banned.discard(peer)
        entry = self._entry(peer)
        if entry.told != address:
            entry.told = address
            entry.changed()
        if not entry.known:
            entry.known = True
            if self.quic is not None:
                self.quic.use_relays(address.relays)
            self._seeker.seek(entry)

    def forget(self, peer: PeerId) -> None:
        self._banned.add(peer)
        entry = self._peers.pop(peer, None)
        if entry is None:
            return
        for keeper in entry.keepers:
            keeper.cancel()
        for waiting in entry.waiting:
            if not waiting.done():
                waiting.set_exception(Unreachable("the peer was forgotten"))
        for carrier in list(entry.carriers):
            self.spawn(carrier.farewell("not a member"))
        self.event("link_closed", peer=peer, way=entry.way, reason="forgotten")

    async def ask(self, peer: PeerId, message: Message, timeout_s: float = 10.0, most_body: int = 1 << 20) -> Message:
        try:
            async with asyncio.timeout(timeout_s):
                carrier = await self._way_to(peer)
                return await carrier.ask(message, most_body)
        except TimeoutError as e:
            raise Unreachable(f"{peer[:10]} has not answered {message.kind!r} within {timeout_s:g} s") from e

    def tell(self, peer: PeerId, message: Message) -> None:
        entry = self._peers.get(peer)
        carrier = entry.best() if entry is not None else None
        if carrier is not None:
            carrier.tell(message)

    def links(self) -> dict[PeerId, LinkState]:
        now = time.monotonic()
        return {p.id: p.state(now) for p in self._peers.values()}

    # carrier.Host

    def most_body(self, kind: str) -> int | None:
        entry = self._handlers.get(kind)
        return None if entry is None else entry[1]

    async def serve(self, carrier: Carrier, message: Message, asked: bool) -> Message | None:
        if carrier.peer in self._banned:
            raise Refused("not a member")
        try:
            return await self._handlers[message.kind][0](carrier.peer, message)
        except Refused:
            raise
        except Exception as e:  # a handler's mistake must not take the link down; it is seen here and by who asked
            self.event("handler_failed", peer=carrier.peer, message=message.kind, reason=f"{type(e).__name__}: {e}")
            raise Refused(f"{message.kind!r} failed there ({type(e).__name__})") from e

    def heard(self, carrier: Carrier) -> None:
        entry = self._peers.get(carrier.peer)
        if entry is not None and entry.way != carrier.way() and entry.best() is carrier:
            self._note_way(entry, "the path has changed")

    def ended(self, carrier: Carrier, why: str, bad: bool) -> None:
        entry = self._peers.get(carrier.peer)
        if bad:
            self.event("frame_refused", peer=carrier.peer, way=carrier.way(), reason=why)
        if entry is None or carrier not in entry.carriers:
            return
        entry.remember(carrier)
        entry.carriers.remove(carrier)
        entry.sent_bytes += carrier.sent_bytes
        entry.received_bytes += carrier.received_bytes
        if not carrier.retiring:
            self.event("link_down", peer=carrier.peer, way=carrier.way(), reason=why)
        self._note_way(entry, why)
        entry.changed()
        if not entry.known and not entry.carriers:
            del self._peers[entry.id]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Once. What goes wrong there is journaled: it is of one link, and others go on."""
        self.tasks.spawn(work)

    def _journaled(self, kind: str, **fields: Any) -> None:
        self.event(kind, **fields)

    # Connections come in, or are dialed.

    def greeting(self, link: str, bulk: bool, you_are: str, own_host: str = "") -> Greeting:
        if bulk:
            return Greeting(self._boot, link, True)
        address = self.address()
        if own_host and self.listener.port:
            at = wire.text_of((own_host, self.listener.port))
            address = Address(address.relays, address.direct, tuple(dict.fromkeys((at, *address.tcp)))[:16])
        return Greeting(self._boot, link, False, address, you_are, self._proof()[:MOST_PROOF])

    def _welcome(self, peer: PeerId, said: Greeting, seen: str) -> Greeting | str:
        why = self.objection(peer, said)
        if why:
            if why != ALREADY:
                self.event("link_refused", peer=peer, at=seen, reason=why)
            return why
        return self.greeting(said.link, said.bulk, seen)

    def objection(self, peer: PeerId, said: Greeting) -> str:
        if self._closed:
            return "it is leaving"
        if peer == self.id:
            return "it has the same key as this peer"
        if peer in self._banned:
            return "not a member"
        carrier = self._carrier(peer, said.link)
        there = carrier is not None
        if said.bulk:
            if carrier is not None and carrier.bulk_count >= MOST_BULK:
                return "more connections for bulk than a link has"
            return "" if there else "a connection for bulk of no link"
        if there:  # it has dialed all our addresses at once, and another one was faster
            return ALREADY
        if peer in self._peers and len(self._peers[peer].carriers) >= MOST_CARRIERS:
            return "more connections than a peer has"
        try:
            return "" if self._admit(peer, said.proof) else "not invited"
        except Exception as e:  # a proof that breaks the judge is no proof
            return f"its proof cannot be judged ({type(e).__name__})"

    def _on_stranger(self, at: str, why: str) -> None:
        self.event("link_refused", peer="", at=at, reason=why)

    def _on_tcp(self, proven: Proven, pipe: SecurePipe) -> None:
        if proven.greeting.bulk:
            carrier = self._carrier(proven.peer, proven.greeting.link)
            if carrier is None:
                pipe.close()
            else:
                carrier.add_bulk(pipe)
            return
        self.learn_host(proven.greeting.you_are)
        self.adopt(proven.peer, proven.greeting, pipe, False, tcp.way, None)

    def _on_quic(self, peer: PeerId, said: Greeting, pipe: Pipe, way: Callable[[], Way]) -> None:
        if said.bulk:
            carrier = self._carrier(peer, said.link)
            if carrier is None:
                pipe.close()
            else:
                carrier.add_bulk(pipe)
            return
        self.adopt(peer, said, pipe, False, way, None)

    def adopt(
        self,
        peer: PeerId,
        said: Greeting,
        control: Pipe,
        dialed: bool,
        way: Callable[[], Way],
        open_bulk: Callable[[], Coroutine[Any, Any, Pipe]] | None,
    ) -> None:
        entry = self._entry(peer)
        entry.said = said.address
        stripes = self.how.stripes[way() != "tcp"]
        carrier = Carrier(self, peer, said.boot, said.link, control, dialed, way, open_bulk, stripes)
        before = list(entry.carriers)
        entry.carriers.append(carrier)
        for old in before:
            if old.boot != said.boot:
                self.event("link_taken_over", peer=peer, way=old.way(), reason="the peer was started again")
                old.retiring = True
                old.close("the peer was started again")
            elif (old.way() == "tcp") == (way() == "tcp") and not old.retiring:
                if self._newer_wins(old, dialed):
                    self.spawn(old.retire())
                else:
                    carrier.retiring = True
        carrier.start()
        if carrier.retiring:
            self.spawn(carrier.retire())
        carrier.beat()
        entry.failures.clear()
        self._note_way(entry, "dialed" if dialed else "accepted")
        entry.changed()
        for waiting in entry.waiting:
            if not waiting.done():
                waiting.set_result(None)
        entry.waiting.clear()

    def _newer_wins(self, old: Carrier, dialed: bool) -> bool:
        """Both sides must keep the same one: of two dialed at once, that of the smaller key; else the newer, whose
        dialer has lost the other."""
        now = time.monotonic()
        silent = old.suspect or now - old.heard_s > 2 * HEARTBEAT_S
        if old.dialed == dialed or now - old.born_s > SIMULTANEOUS_S or silent:
            return True
        return dialed == (self.id < old.peer)

    # Small things.

    def _entry(self, peer: PeerId) -> Peer:
        return self._peers.setdefault(peer, Peer(peer))

    def _carrier(self, peer: PeerId, link: str) -> Carrier | None:
        entry = self._peers.get(peer)
        return next((c for c in entry.carriers if c.link == link and not c.dialed), None) if entry else None

    def learn_host(self, you_are: str) -> None:
        """A public address of a machine that has only a private one of its own; of use where its port is open."""
        with contextlib.suppress(ValueError):
            host = wire.address_of(you_are)[0]
            if host and not host.startswith("127.") and host not in self._seen_hosts:
                self._seen_hosts = [*self._seen_hosts, host][-4:]

    async def _way_to(self, peer: PeerId) -> Carrier:
        while True:
            entry = self._peers.get(peer)
            if entry is None:
                raise Unreachable(f"nobody has told where {peer[:10]} is")
            carrier = entry.best()
            if carrier is not None:
                return carrier
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry.waiting.append(waiting)
            await waiting

    def _note_way(self, entry: Peer, why: str) -> None:
        """Journals what the link has become, where that is something else."""
        best = entry.best()
        way = best.way() if best is not None else None
        if way == entry.way:
            return
        before, entry.way = entry.way, way
        if way is None:
            self.event("link_lost", peer=entry.id, way=before, reason=why)
        elif before is None:
            self.event("link_up", peer=entry.id, way=way, reason=why)
        else:
            kind = "link_upgrade" if RANK[way] < RANK[before] else "link_failover"
            self.event(kind, peer=entry.id, way=way, before=before, reason=why)

    async def _heartbeat(self) -> None:
        beats = 0
        while True:
            before = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S / 2)
            now, beats = time.monotonic(), beats + 1
            late = now - before > HEARTBEAT_S  # this process stood still, so it cannot say who was silent
            for entry in list(self._peers.values()):
                for carrier in list(entry.carriers):
                    try:
                        if beats % 2:
                            carrier.tick(now)
                            carrier.beat()
                        if not late:
                            self._listen_to(entry, carrier, now - carrier.heard_s)
                    except Exception as e:  # of one link; the others' hearts go on beating
                        carrier.close(f"{type(e).__name__}: {e}")

    def _listen_to(self, entry: Peer, carrier: Carrier, silent_s: float) -> None:
        # iroh sends a new connection by the old one's path as long as that one is there: it has to go first.
        stuck = carrier.way() == "direct" and silent_s > STUCK_S and bool(entry.address().relays)
        if silent_s > self.how.silent_s or stuck:
            carrier.close(f"silent for {silent_s:.0f} s")
        elif (silent_s > min(SUSPECT_S, 0.6 * self.how.silent_s)) != carrier.suspect:
            carrier.suspect = not carrier.suspect
            if carrier.suspect:
                self.event(
                    "link_silent", peer=entry.id, way=carrier.way(), reason=f"nothing heard for {silent_s:.1f} s"
                )
                entry.changed()
            self._note_way(entry, "silent" if carrier.suspect else "heard again")
