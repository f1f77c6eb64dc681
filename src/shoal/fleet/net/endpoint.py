"""One peer's end of all its links: finds a way to each peer it knows, keeps it alive, and changes it when it breaks.

Ways, best first: TCP (straight, whoever of the two can be dialed), QUIC straight to the peer (through a punched hole),
QUIC through a relay. A worse way is used at once when it is there first, and left when a better one is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal import wire
from shoal.fleet.net import punch, tcp
from shoal.fleet.net.api import (
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
from shoal.fleet.net.carrier import Budget, Carrier
from shoal.fleet.net.identity import Identity, is_peer
from shoal.fleet.net.pipe import Broken, Greeting, Pipe
from shoal.fleet.net.secure import Proven, SecurePipe

if TYPE_CHECKING:
    from shoal.fleet.net.quic import Quic

HEARTBEAT_S = 1.0
SUSPECT_S = 2.5  # a connection that is not heard of for so long: another way is looked for
STUCK_S = 3.2  # QUIC: it is given up, if a relay could carry it instead
SILENT_S = 5.0  # and for so long: it is given up
SIMULTANEOUS_S = 5.0  # two connections dialed by either side within this are one intention
RETRY_S = (0.5, 20.0)  # between dials: at first, at most
BETTER_S = (10.0, 120.0)  # between attempts to find a better way than the one there is: at first, at most
HEAD_START_S = 0.4  # TCP's, before QUIC is tried
PUNCH = "link punch"  # the endpoint's own kind of message
MOST_PUNCHING = 16
MOST_REFUSALS = 10  # a second, in the journal
HELD_BYTES = 256 << 20  # of bodies that others have announced
_RANK: dict[Way, int] = {"tcp": 0, "direct": 1, "relay": 2}


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


class Limited:
    """For the journal, which strangers must not be able to fill: ten refusals a second, the others are counted."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._second, self._count, self._left_out = 0, 0, 0

    def __call__(self, kind: str, **fields: Any) -> None:
        if kind in ("link_refused", "frame_refused"):
            second = int(time.monotonic())
            self._count = self._count + 1 if second == self._second else 1
            self._second = second
            if self._count > MOST_REFUSALS:
                self._left_out += 1
                return
            if self._left_out:
                fields["left_out"], self._left_out = self._left_out, 0
        self._event(kind, **fields)


def _nobody_listens(kind: str, **fields: Any) -> None:
    pass


@dataclass
class _Peer:
    id: PeerId
    known: bool = False
    told: Address = field(default_factory=Address)  # by whoever knows it
    said: Address = field(default_factory=Address)  # by itself, in its greeting
    carriers: list[Carrier] = field(default_factory=list)
    keepers: dict[asyncio.Task[None], asyncio.Event] = field(default_factory=dict)  # set: something has changed
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    way: Way | None = None  # as last journaled
    heard_s: float | None = None
    rtt_s: float | None = None
    loss: float | None = None
    up: float | None = None
    down: float | None = None
    sent_bytes: int = 0  # of carriers that are gone
    received_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # where, why: each is journaled once

    def best(self) -> Carrier | None:
        there = [c for c in self.carriers if not c.closed]
        return min(there, key=lambda c: (c.retiring, c.suspect, _RANK[c.way()], -c.born_s), default=None)

    def changed(self) -> None:
        """A carrier more or less, one that is silent, another address."""
        for event in self.keepers.values():
            event.set()

    def sound(self) -> Way | None:
        """The best way of those that nothing speaks against."""
        best = self.best()
        return None if best is None or best.retiring or best.suspect else best.way()


Keep = Callable[[_Peer, asyncio.Event], Coroutine[Any, Any, None]]


class Pauses:
    """Between attempts: short where there is no link at all, longer where a better one is looked for; both grow."""

    def __init__(self) -> None:
        self._retry_s, self._better_s = RETRY_S[0], BETTER_S[0]
        self._address: Address | None = None

    async def wait(self, changed: asyncio.Event, lost: bool | None, address: Address) -> None:
        """`lost`: True, there is no link; False, there is one that could be better; None, all is well."""
        if address != self._address or lost is None:
            self._address, self._retry_s, self._better_s = address, RETRY_S[0], BETTER_S[0]
        pause = None
        if lost:
            pause, self._retry_s = self._retry_s * random.uniform(0.7, 1.3), min(2 * self._retry_s, RETRY_S[1])
        elif lost is False:
            pause, self._better_s = self._better_s, min(2 * self._better_s, BETTER_S[1])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await changed.wait()


class Peers:
    """Implements `api.Endpoint`."""

    def __init__(self, identity: Identity, admit: Admit, event: Event, proof: Proof, how: How) -> None:
        self.id: PeerId = identity.id
        self.budget = Budget(HELD_BYTES)
        self._me, self._admit, self._proof, self._event = identity, admit, proof, Limited(event)
        self._how = how
        self._boot = secrets.token_hex(8)
        self._listener = tcp.Listener(identity, self._welcome, self._on_tcp, self._on_stranger, how.congestion)
        self._quic: Quic | None = None
        self._handlers: dict[str, tuple[Handler, int]] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._banned: set[PeerId] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seen_hosts: list[str] = []  # this machine's, as others see them
        self._closed = False
        self._punching = 0
        if how.punch:
            self.on(PUNCH, self._punched)

    # api.Endpoint

    async def start(self) -> None:
        await self._listener.start(self._how.host, self._how.port)
        if self._how.quic:
            from shoal.fleet.net.quic import Quic

            self._quic = Quic(self._me, self._how.relays, self._how.host, self._how.port, self._event, self._proof)
            await self._quic.start(self._welcome, self._on_quic)
        self.spawn(self._heartbeat())

    async def close(self) -> None:
        self._closed = True
        carriers = [c for p in self._peers.values() for c in p.carriers]
        for peer in self._peers.values():
            for keeper in peer.keepers:
                keeper.cancel()
        await asyncio.gather(*(c.farewell("it is leaving") for c in carriers))
        tasks = [t for t in self._tasks if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._listener.close()
        if self._quic is not None:
            await self._quic.close()

    def address(self) -> Address:
        port = self._listener.port
        host = self._how.host
        hosts = [host] if host not in ("", "0.0.0.0", "::") else [*tcp.own_hosts(), *self._seen_hosts]
        at = tuple(dict.fromkeys(wire.text_of((h, port)) for h in hosts if h)) if port else ()
        if self._quic is None:
            return Address((), (), at[:16])
        return Address(self._quic.relays(), self._quic.direct()[:16], at[:16])

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
            if self._quic is not None:
                self._quic.use_relays(address.relays)
            keepers = [self._keep_tcp]
            if self._quic is not None:
                keepers += [self._keep_quic, *([self._keep_punching] if self._how.punch and self.id < peer else [])]
            for keep in keepers:
                event = asyncio.Event()
                entry.keepers[asyncio.ensure_future(self._for_ever(keep, entry, event))] = event

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
        self._event("link_closed", peer=peer, way=entry.way, reason="forgotten")

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
        return {p.id: _state(p, now) for p in self._peers.values()}

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
            self._event("handler_failed", peer=carrier.peer, message=message.kind, reason=f"{type(e).__name__}: {e}")
            raise Refused(f"{message.kind!r} failed there ({type(e).__name__})") from e

    def heard(self, carrier: Carrier) -> None:
        entry = self._peers.get(carrier.peer)
        if entry is not None and entry.way != carrier.way() and entry.best() is carrier:
            self._note_way(entry, "the path has changed")

    def ended(self, carrier: Carrier, why: str, bad: bool) -> None:
        entry = self._peers.get(carrier.peer)
        if bad:
            self._event("frame_refused", peer=carrier.peer, way=carrier.way(), reason=why)
        if entry is None or carrier not in entry.carriers:
            return
        _remember(entry, carrier)
        entry.carriers.remove(carrier)
        entry.sent_bytes += carrier.sent_bytes
        entry.received_bytes += carrier.received_bytes
        if not carrier.retiring:
            self._event("link_down", peer=carrier.peer, way=carrier.way(), reason=why)
        self._note_way(entry, why)
        entry.changed()
        if not entry.known and not entry.carriers:
            del self._peers[entry.id]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Connections come in, or are dialed.

    def _greeting(self, link: str, bulk: bool, you_are: str, own_host: str = "") -> Greeting:
        if bulk:
            return Greeting(self._boot, link, True)
        address = self.address()
        if own_host and self._listener.port:
            at = wire.text_of((own_host, self._listener.port))
            address = Address(address.relays, address.direct, tuple(dict.fromkeys((at, *address.tcp)))[:16])
        return Greeting(self._boot, link, False, address, you_are, self._proof()[:MOST_PROOF])

    def _welcome(self, peer: PeerId, said: Greeting, seen: str) -> Greeting | str:
        why = self._objection(peer, said)
        if why:
            self._event("link_refused", peer=peer, at=seen, reason=why)
            return why
        return self._greeting(said.link, said.bulk, seen)

    def _objection(self, peer: PeerId, said: Greeting) -> str:
        if self._closed:
            return "it is leaving"
        if peer == self.id:
            return "it has the same key as this peer"
        if peer in self._banned:
            return "not a member"
        if said.bulk:
            return "" if self._carrier(peer, said.link) is not None else "a connection for bulk of no link"
        try:
            return "" if self._admit(peer, said.proof) else "not invited"
        except Exception as e:  # a proof that breaks the judge is no proof
            return f"its proof cannot be judged ({type(e).__name__})"

    def _on_stranger(self, at: str, why: str) -> None:
        self._event("link_refused", peer="", at=at, reason=why)

    def _on_tcp(self, proven: Proven, pipe: SecurePipe) -> None:
        if proven.greeting.bulk:
            carrier = self._carrier(proven.peer, proven.greeting.link)
            if carrier is None:
                pipe.close()
            else:
                carrier.add_bulk(pipe)
            return
        self._learn_host(proven.greeting.you_are)
        self._adopt(proven.peer, proven.greeting, pipe, False, _tcp, None)

    def _on_quic(self, peer: PeerId, said: Greeting, pipe: Pipe, way: Callable[[], Way]) -> None:
        if said.bulk:
            carrier = self._carrier(peer, said.link)
            if carrier is None:
                pipe.close()
            else:
                carrier.add_bulk(pipe)
            return
        self._adopt(peer, said, pipe, False, way, None)

    def _adopt(
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
        stripes = self._how.stripes[way() != "tcp"]
        carrier = Carrier(self, peer, said.boot, said.link, control, dialed, way, open_bulk, stripes)
        before = list(entry.carriers)
        entry.carriers.append(carrier)
        for old in before:
            if old.boot != said.boot:
                self._event("link_taken_over", peer=peer, way=old.way(), reason="the peer was started again")
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

    # Each known peer has a task a way, that looks for it as long as there is no better one.

    async def _for_ever(self, keep: Keep, entry: _Peer, changed: asyncio.Event) -> None:
        """A mistake here, or an error that iroh has not announced, must not leave a peer without anybody who looks."""
        while True:
            try:
                await keep(entry, changed)
            except Exception as e:
                self._event("link_error", peer=entry.id, reason=f"{type(e).__name__}: {e}")
            await asyncio.sleep(RETRY_S[1])

    async def _keep_tcp(self, entry: _Peer, changed: asyncio.Event) -> None:
        pauses = Pauses()
        while True:
            changed.clear()
            if entry.sound() != "tcp":
                await self._dial_tcp(entry)
            way = entry.sound()
            await pauses.wait(changed, None if way == "tcp" else way is None, entry.told)

    async def _keep_quic(self, entry: _Peer, changed: asyncio.Event) -> None:
        if entry.told.tcp:
            await asyncio.sleep(HEAD_START_S)  # QUIC is for those that TCP does not reach
        pauses = Pauses()
        while True:
            changed.clear()
            way = entry.sound()
            if way is None:
                await self._dial_quic(entry)
            elif way == "relay" and self.id < entry.id:  # one of the two is enough
                await self._dial_quic(entry, better=True)
            way = entry.sound()
            await pauses.wait(changed, None if way in ("tcp", "direct") else way is None, entry.told)

    async def _keep_punching(self, entry: _Peer, changed: asyncio.Event) -> None:
        """One of the two asks, the other does the same."""
        pauses = Pauses()
        while True:
            changed.clear()
            if entry.sound() in ("direct", "relay"):
                await self._punch_tcp(entry)
            await pauses.wait(changed, False if entry.sound() in ("direct", "relay") else None, entry.told)

    async def _dial_tcp(self, entry: _Peer) -> None:
        """All its addresses at once; the first that answers."""
        own = set(self.address().tcp)
        found = [at for at in dict.fromkeys((*entry.told.tcp, *entry.said.tcp)) if at not in own]
        dials = {asyncio.ensure_future(self._dial_tcp_at(entry, at)) for at in found}
        try:
            while dials and entry.sound() != "tcp":
                done, dials = await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
                for dial in done:
                    dial.result()
        finally:
            for dial in dials:
                dial.cancel()

    async def _dial_tcp_at(self, entry: _Peer, at: str) -> None:
        link = secrets.token_hex(8)
        if at not in entry.failures:
            self._event("link_dial", peer=entry.id, way="tcp", at=at)
        try:
            proven, pipe = await self._reach_tcp(entry.id, at, link, False)
        except (Broken, Refused) as e:
            self._note_failure(entry, "tcp", at, e)
            return
        if any(c.dialed and c.way() == "tcp" and not c.suspect for c in entry.carriers):  # another address was faster
            pipe.close()
            return
        if why := self._objection(entry.id, proven.greeting):
            self._event("link_refused", peer=entry.id, at=at, reason=why)
            pipe.close()
            return
        self._learn_host(proven.greeting.you_are)
        self._adopt(entry.id, proven.greeting, pipe, True, _tcp, partial(self._bulk_tcp, entry.id, at, link))

    async def _bulk_tcp(self, peer: PeerId, at: str, link: str) -> Pipe:
        return (await self._reach_tcp(peer, at, link, True))[1]

    async def _reach_tcp(self, peer: PeerId, at: str, link: str, bulk: bool) -> tuple[Proven, SecurePipe]:
        return await tcp.reach(self._me, peer, at, partial(self._greeting, link, bulk, at), self._how.congestion)

    # TCP through NATs: the link that there is tells both where and when.

    async def _punch_tcp(self, entry: _Peer) -> None:
        if not self.address().relays:
            return
        link = secrets.token_hex(8)
        if "punch" not in entry.failures:
            self._event("link_punch", peer=entry.id, way="tcp", at=" ".join(self.address().relays))
        try:
            proven, pipe = await self._reach_punched(entry.id, link, False)
        except (Broken, Refused, Unreachable) as e:
            self._note_failure(entry, "tcp", "punch", e)
            return
        if why := self._objection(entry.id, proven.greeting):
            self._event("link_refused", peer=entry.id, at=pipe.seen, reason=why)
            pipe.close()
            return
        self._adopt(entry.id, proven.greeting, pipe, True, _tcp, partial(self._bulk_punched, entry.id, link))

    async def _bulk_punched(self, peer: PeerId, link: str) -> Pipe:
        return (await self._reach_punched(peer, link, True))[1]

    async def _reach_punched(self, peer: PeerId, link: str, bulk: bool) -> tuple[Proven, SecurePipe]:
        mine = await punch.door(self.address().relays[0])
        try:
            answer = await self.ask(peer, Message(PUNCH, {"at": mine.seen}), 2 * punch.ASK_S)
            theirs = answer.fields.get("at")
            if not isinstance(theirs, str):
                raise Broken("it does not tell where it is seen")
            sock = await punch.meet(mine, theirs)
            return await tcp.reach(
                self._me, peer, sock, partial(self._greeting, link, bulk, theirs), self._how.congestion
            )
        except ValueError as e:
            raise Broken("it does not tell where it is seen") from e
        finally:
            mine.close()

    async def _punched(self, peer: PeerId, message: Message) -> Message:
        at, relays = message.fields.get("at"), self.address().relays
        if not isinstance(at, str) or not relays or self._punching >= MOST_PUNCHING:
            raise Refused("no TCP through this NAT now")
        self._punching += 1
        try:
            mine = await punch.door(relays[0])
        except Broken as e:
            self._punching -= 1
            raise Refused(str(e)) from e
        self.spawn(self._meet(mine, at))
        return Message(PUNCH, {"at": mine.seen})

    async def _meet(self, mine: punch.Door, at: str) -> None:
        try:
            sock = await punch.meet(mine, at)
        except (Broken, ValueError):
            return  # the other one journals it
        finally:
            mine.close()
            self._punching -= 1
        await self._listener.take(sock)

    async def _dial_quic(self, entry: _Peer, better: bool = False) -> None:
        assert self._quic is not None
        address = _union(entry.told, entry.said)
        if not (address.direct or address.relays):
            return
        link = secrets.token_hex(8)
        if "quic" not in entry.failures:
            kind = "link_punch" if better or (address.relays and address.direct) else "link_dial"
            way = "direct" if address.direct else "relay"
            self._event(kind, peer=entry.id, way=way, at=" ".join((*address.direct, *address.relays)))
        try:
            dialed = await self._quic.dial(entry.id, address, partial(self._greeting, link, False, ""), better)
        except (Broken, Refused) as e:
            self._note_failure(entry, "direct", "quic", e)
            return
        if why := self._objection(entry.id, dialed.greeting):
            self._event("link_refused", peer=entry.id, at="quic", reason=why)
            dialed.pipe.close()
            return
        bulk = partial(self._quic.dial_bulk, entry.id, address, partial(self._greeting, link, True, ""))
        self._adopt(entry.id, dialed.greeting, dialed.pipe, True, dialed.pipe.way, bulk)

    # Small things.

    def _entry(self, peer: PeerId) -> _Peer:
        return self._peers.setdefault(peer, _Peer(peer))

    def _carrier(self, peer: PeerId, link: str) -> Carrier | None:
        entry = self._peers.get(peer)
        return next((c for c in entry.carriers if c.link == link and not c.dialed), None) if entry else None

    def _learn_host(self, you_are: str) -> None:
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

    def _note_way(self, entry: _Peer, why: str) -> None:
        """Journals what the link has become, where that is something else."""
        best = entry.best()
        way = best.way() if best is not None else None
        if way == entry.way:
            return
        before, entry.way = entry.way, way
        if way is None:
            self._event("link_lost", peer=entry.id, way=before, reason=why)
        elif before is None:
            self._event("link_up", peer=entry.id, way=way, reason=why)
        else:
            kind = "link_upgrade" if _RANK[way] < _RANK[before] else "link_failover"
            self._event(kind, peer=entry.id, way=way, before=before, reason=why)

    def _note_failure(self, entry: _Peer, way: Way, at: str, error: Exception) -> None:
        why = str(error) or type(error).__name__
        if entry.failures.get(at) != why:
            entry.failures[at] = why
            kind = "link_denied" if isinstance(error, Refused) else "link_failed"
            self._event(kind, peer=entry.id, way=way, at=at, reason=why)

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

    def _listen_to(self, entry: _Peer, carrier: Carrier, silent_s: float) -> None:
        # iroh sends a new connection by the old one's path as long as that one is there: it has to go first.
        stuck = carrier.way() == "direct" and silent_s > STUCK_S and bool(_union(entry.told, entry.said).relays)
        if silent_s > self._how.silent_s or stuck:
            carrier.close(f"silent for {silent_s:.0f} s")
        elif (silent_s > min(SUSPECT_S, 0.6 * self._how.silent_s)) != carrier.suspect:
            carrier.suspect = not carrier.suspect
            if carrier.suspect:
                self._event(
                    "link_silent", peer=entry.id, way=carrier.way(), reason=f"nothing heard for {silent_s:.1f} s"
                )
                entry.changed()
            self._note_way(entry, "silent" if carrier.suspect else "heard again")


def _tcp() -> Way:
    return "tcp"


def _union(a: Address, b: Address) -> Address:
    def both(x: tuple[str, ...], y: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*x, *y)))

    return Address(both(a.relays, b.relays), both(a.direct, b.direct), both(a.tcp, b.tcp))


def _remember(entry: _Peer, carrier: Carrier) -> None:
    """What was measured stays when the connection goes."""
    entry.heard_s = max(entry.heard_s or 0.0, carrier.heard_s)
    entry.rtt_s = carrier.rtt_s or entry.rtt_s
    entry.loss = carrier.loss.share if carrier.loss.share is not None else entry.loss
    entry.up = carrier.up_bytes_per_s or entry.up
    entry.down = carrier.down.bytes_per_s or entry.down


def _state(entry: _Peer, now: float) -> LinkState:
    best = entry.best()
    for carrier in entry.carriers:
        entry.heard_s = max(entry.heard_s or 0.0, carrier.heard_s)
    if best is not None:
        _remember(entry, best)
    return LinkState(
        entry.id,
        best.way() if best is not None else None,
        entry.rtt_s if best is not None else None,
        entry.loss,
        entry.up,
        entry.down,
        None if entry.heard_s is None else now - entry.heard_s,
        entry.sent_bytes + sum(c.sent_bytes for c in entry.carriers),
        entry.received_bytes + sum(c.received_bytes for c in entry.carriers),
    )
