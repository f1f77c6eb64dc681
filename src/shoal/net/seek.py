"""Looks for ways to the peers that this one knows: a task for each way, as long as there is no better one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal import wire
from shoal.net import punch, tcp
from shoal.net.answers import Answers
from shoal.net.api import Address, Message, PeerId, Refused, Unreachable, Way
from shoal.net.peer import Peer
from shoal.net.pipe import Broken, Pipe
from shoal.net.secure import Proven, SecurePipe
from shoal.values import BadValue, text

if TYPE_CHECKING:
    from shoal.net.endpoint import Peers

RETRY_S = (0.5, 5.0)  # between dials: at first, at most
BETTER_S = (10.0, 120.0)  # between attempts to find a better way than the one there is: at first, at most
HEAD_START_S = 0.4  # TCP's, before QUIC is tried
PUNCH = "link punch"  # the endpoint's own kind of message
MOST_PUNCHING = 16
ALREADY = "it is connected already"

Keep = Callable[[Peer, asyncio.Event], Coroutine[Any, Any, None]]


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


def read_place(said: Message) -> str:
    """Where a peer is seen: an ip:port that others can reach."""
    at = text(said.fields.get("at"), 64)
    try:
        port = wire.address_of(at)[1]
    except ValueError as e:
        raise BadValue(str(e)) from None
    if port < 1024:
        raise BadValue(f"{at} is no port of a peer")
    return at


class Seeker:
    def __init__(self, ends: Peers) -> None:
        self._ends, self._punching, self._answers = ends, 0, Answers(ends, ends.event)
        if ends.how.punch:
            ends.on(PUNCH, self._punched)

    def seek(self, entry: Peer) -> None:
        keepers = [self._keep_tcp]
        if self._ends.quic is not None:
            keepers.append(self._keep_quic)
            if self._ends.how.punch and self._ends.id < entry.id:  # one of the two asks, the other does the same
                keepers.append(self._keep_punching)
        for keep in keepers:
            event = asyncio.Event()
            entry.keepers[asyncio.ensure_future(self._for_ever(keep, entry, event))] = event

    async def _for_ever(self, keep: Keep, entry: Peer, changed: asyncio.Event) -> None:
        """A mistake here, or an error that iroh has not announced, must not leave a peer without anybody who looks."""
        while True:
            try:
                await keep(entry, changed)
            except Exception as e:
                self._ends.event("link_error", peer=entry.id, reason=f"{type(e).__name__}: {e}")
            await asyncio.sleep(RETRY_S[1])

    async def _keep_tcp(self, entry: Peer, changed: asyncio.Event) -> None:
        pauses = Pauses()
        while True:
            changed.clear()
            if entry.sound() != "tcp":
                await self._dial_tcp(entry)
            way = entry.sound()
            await pauses.wait(changed, None if way == "tcp" else way is None, entry.told)

    async def _keep_quic(self, entry: Peer, changed: asyncio.Event) -> None:
        if entry.told.tcp:
            await asyncio.sleep(HEAD_START_S)  # QUIC is for those that TCP does not reach
        pauses = Pauses()
        while True:
            changed.clear()
            way = entry.sound()
            if way is None:
                await self._dial_quic(entry)
            elif way == "relay" and self._ends.id < entry.id:  # one of the two is enough
                await self._dial_quic(entry, better=True)
            way = entry.sound()
            await pauses.wait(changed, None if way in ("tcp", "direct") else way is None, entry.told)

    async def _keep_punching(self, entry: Peer, changed: asyncio.Event) -> None:
        """One of the two asks, the other does the same."""
        pauses = Pauses()
        while True:
            changed.clear()
            if entry.sound() in ("direct", "relay"):
                await self._punch_tcp(entry)
            await pauses.wait(changed, False if entry.sound() in ("direct", "relay") else None, entry.told)

    async def _dial_tcp(self, entry: Peer) -> None:
        """All its addresses at once; the first that answers."""
        own = set(self._ends.address().tcp)
        link = secrets.token_hex(8)  # one for all: the other side takes the first that arrives
        found = [at for at in entry.address().tcp if at not in own]
        dials = {asyncio.ensure_future(self._dial_tcp_at(entry, at, link)) for at in found}
        try:
            while dials and entry.sound() != "tcp":
                done, dials = await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
                for dial in done:
                    dial.result()
        finally:
            for dial in dials:
                dial.cancel()

    async def _dial_tcp_at(self, entry: Peer, at: str, link: str) -> None:
        if at not in entry.failures:
            self._ends.event("link_dial", peer=entry.id, way="tcp", at=at)
        try:
            proven, pipe = await self._reach_tcp(entry.id, at, link, False)
        except (Broken, Refused) as e:
            self._note_failure(entry, "tcp", at, e)
            return
        if why := self._ends.objection(entry.id, proven.greeting):
            self._ends.event("link_refused", peer=entry.id, at=at, reason=why)
            pipe.close()
            return
        self._ends.learn_host(proven.greeting.you_are)
        self._ends.adopt(entry.id, proven.greeting, pipe, True, tcp.way, partial(self._bulk_tcp, entry.id, at, link))

    async def _bulk_tcp(self, peer: PeerId, at: str, link: str) -> Pipe:
        return (await self._reach_tcp(peer, at, link, True))[1]

    async def _reach_tcp(self, peer: PeerId, at: str, link: str, bulk: bool) -> tuple[Proven, SecurePipe]:
        return await tcp.reach(
            self._ends.me, peer, at, partial(self._ends.greeting, link, bulk, at), self._ends.how.congestion
        )

    # TCP through NATs: the link that there is tells both where and when.

    async def _punch_tcp(self, entry: Peer) -> None:
        if not self._ends.address().relays:
            return
        link = secrets.token_hex(8)
        if "punch" not in entry.failures:
            self._ends.event("link_punch", peer=entry.id, way="tcp", at=" ".join(self._ends.address().relays))
        try:
            proven, pipe = await self._reach_punched(entry.id, link, False)
        except (Broken, Refused, Unreachable) as e:
            self._note_failure(entry, "tcp", "punch", e)
            return
        if why := self._ends.objection(entry.id, proven.greeting):
            self._ends.event("link_refused", peer=entry.id, at=pipe.seen, reason=why)
            pipe.close()
            return
        self._ends.adopt(entry.id, proven.greeting, pipe, True, tcp.way, partial(self._bulk_punched, entry.id, link))

    async def _bulk_punched(self, peer: PeerId, link: str) -> Pipe:
        return (await self._reach_punched(peer, link, True))[1]

    async def _reach_punched(self, peer: PeerId, link: str, bulk: bool) -> tuple[Proven, SecurePipe]:
        mine = await punch.door(self._ends.address().relays[0])
        try:
            asked = Message(PUNCH, {"at": mine.seen})
            theirs = await self._answers.ask(peer, asked, read_place, 2 * punch.ASK_S)
            sock = await punch.meet(mine, theirs)
            return await tcp.reach(
                self._ends.me, peer, sock, partial(self._ends.greeting, link, bulk, theirs), self._ends.how.congestion
            )
        finally:
            mine.close()

    async def _punched(self, peer: PeerId, message: Message) -> Message:
        relays = self._ends.address().relays
        try:
            at = read_place(message)
        except BadValue as e:
            self._answers.bad(peer, PUNCH, str(e))
            raise Refused(str(e)) from None
        if not relays or self._punching >= MOST_PUNCHING:
            raise Refused("no TCP through this NAT now")
        self._punching += 1
        try:
            mine = await punch.door(relays[0])
        except Broken as e:
            self._punching -= 1
            raise Refused(str(e)) from e
        self._ends.spawn(self._meet(mine, at))
        return Message(PUNCH, {"at": mine.seen})

    async def _meet(self, mine: punch.Door, at: str) -> None:
        try:
            sock = await punch.meet(mine, at)
        except Broken:
            return  # the other one journals it
        finally:
            mine.close()
            self._punching -= 1
        await self._ends.listener.take(sock)

    async def _dial_quic(self, entry: Peer, better: bool = False) -> None:
        assert self._ends.quic is not None
        address = entry.address()
        if not (address.direct or address.relays):
            return
        link = secrets.token_hex(8)
        if "quic" not in entry.failures:
            kind = "link_punch" if better or (address.relays and address.direct) else "link_dial"
            way = "direct" if address.direct else "relay"
            self._ends.event(kind, peer=entry.id, way=way, at=" ".join((*address.direct, *address.relays)))
        try:
            dialed = await self._ends.quic.dial(
                entry.id, address, partial(self._ends.greeting, link, False, ""), better
            )
        except (Broken, Refused) as e:
            self._note_failure(entry, "direct", "quic", e)
            return
        if why := self._ends.objection(entry.id, dialed.greeting):
            self._ends.event("link_refused", peer=entry.id, at="quic", reason=why)
            dialed.pipe.close()
            return
        bulk = partial(self._ends.quic.dial_bulk, entry.id, address, partial(self._ends.greeting, link, True, ""))
        self._ends.adopt(entry.id, dialed.greeting, dialed.pipe, True, dialed.pipe.way, bulk)

    def _note_failure(self, entry: Peer, way: Way, at: str, error: Exception) -> None:
        why = str(error) or type(error).__name__
        if why != ALREADY and entry.failures.get(at) != why:
            entry.failures[at] = why
            kind = "link_denied" if isinstance(error, Refused) else "link_failed"
            self._ends.event(kind, peer=entry.id, way=way, at=at, reason=why)
