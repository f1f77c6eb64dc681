"""QUIC by iroh: the same keys, through NATs (holes are punched, or a relay carries the packets).

iroh decides how packets travel; here are its connections as pipes, and what it cannot know by itself: this machine's
address as others see it, without which no hole is punched. It is learnt from the rendezvous beside each relay and from
peers that were dialed. A connection's congestion control is CUBIC, which cannot be changed from Python and is slow on
lossy paths, so bulk has several connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal import wire
from shoal.errors import SetupError, needs_extra
from shoal.net.api import Address, Event, PeerId, Proof, Refused, Way
from shoal.net.frames import MOST_BULK_FRAME, MOST_FRAME, BadFrame, Data
from shoal.net.identity import Identity
from shoal.net.pipe import MOST_GREETING, Broken, Counts, Greeting, Pipe, read_greeting
from shoal.net.relay import token
from shoal.net.relays import Relays, plain
from shoal.net.tasks import FOR_EVER, Tasks, words

try:
    import iroh
    from iroh import iroh_ffi
except ImportError as e:
    raise needs_extra("iroh", "swarm", "A swarm that reaches peers behind NATs (it can do without: TCP only)") from e

PROTOCOL = b"shoal/swarm/1"
NO_BETTER = b"no better"
DIAL_S = 8.0
GREETING_S = 6.0
ACCEPTS = "who waits for QUIC connections"
MOST_STRANGERS = 128
MOST_SEEN = 4  # addresses of this machine, as others see it
WINDOW = 16 << 20  # a connection's receive window: 100 Mbit/s over 1 s
_LARGE = 16 << 10
_LENGTH = 4

Greet = Callable[[], Greeting]
Welcome = Callable[[PeerId, Greeting, str], "Greeting | str"]
OnPipe = Callable[[PeerId, Greeting, Pipe, Callable[[], Way]], None]


def _write_fast(self: Any, value: Data) -> None:
    """For the generated one of iroh's Python package, which copies byte by byte (2 MB/s)."""
    size = len(value)
    if size:
        with self._reserve(size):
            to = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
            ctypes.memmove(to, bytes(value), size)  # no copy where it is bytes already


def _quicken() -> None:
    """Only where the loop is still there: uniffi 0.32 has none."""
    builder = getattr(iroh_ffi, "_UniffiRustBufferBuilder", None)
    write = getattr(builder, "write", None)
    with contextlib.suppress(OSError, TypeError):
        if write is not None and hasattr(builder, "_reserve") and "enumerate(value)" in inspect.getsource(write):
            builder.write = _write_fast  # type: ignore[union-attr]  # it is there, its write was found


_quicken()


class QuicPipe:
    """Frames over one stream of a connection of its own, which ends with it."""

    def __init__(self, connection: iroh.Connection, stream: iroh.BiStream, most_frame: int, seen: str) -> None:
        self.seen = seen
        self.connection = connection  # iroh closes what nobody refers to
        self._send, self._receive = stream.send(), stream.recv()
        self._most, self._turn = most_frame, asyncio.Lock()
        self._buffer = bytearray()
        self._way: Way = "relay"
        self._way_s = 0.0

    async def send(self, parts: list[Data]) -> None:
        size = sum(len(p) for p in parts)
        data = b"".join([size.to_bytes(_LENGTH, "big"), *parts])
        async with self._turn:
            try:
                await self._send.write_all(data)
            except iroh.IrohError as e:
                raise Broken(said(e)) from e

    async def receive(self) -> Data:
        await self._fill(_LENGTH)
        size = int.from_bytes(self._buffer[:_LENGTH], "big")
        if not 0 < size <= self._most:
            raise BadFrame(f"a frame of {size} bytes, where at most {self._most} are allowed")
        await self._fill(_LENGTH + size)
        frame = bytes(memoryview(self._buffer)[_LENGTH : _LENGTH + size])
        del self._buffer[: _LENGTH + size]
        return frame

    def limit(self, most_frame: int) -> None:
        self._most = most_frame

    def way(self) -> Way:
        """Looked up a few times a second at most: it is asked for each message."""
        now = time.monotonic()
        if now - self._way_s > 0.3:
            self._way_s = now
            chosen = [p for p in self.connection.paths() if p.is_selected]
            if chosen:
                self._way = "relay" if chosen[0].is_relay else "direct"
        return self._way

    def relay(self) -> str | None:
        """The one that carries it, if one does."""
        chosen = [p for p in self.connection.paths() if p.is_selected and p.is_relay]
        return plain(chosen[0].remote_addr) if chosen else None

    def counts(self) -> Counts:
        found = self.connection.stats()
        return Counts(found.udp_tx_datagrams, found.lost_packets)

    def close(self) -> None:
        with contextlib.suppress(iroh.IrohError):
            self.connection.close(0, b"")

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            try:
                missing = count - len(self._buffer)
                # Each call costs more than its bytes: the rest of a piece by one, small frames by what is there.
                large = missing > _LARGE
                data = await (self._receive.read_exact(missing) if large else self._receive.read(_LARGE))
            except iroh.IrohError as e:
                raise Broken(said(e)) from e
            if not data:
                raise Broken("the connection was closed")
            self._buffer += data


@dataclass(frozen=True)
class Dialed:
    greeting: Greeting
    pipe: QuicPipe


class Quic:
    def __init__(
        self, me: Identity, relays: tuple[str, ...], host: str, port: int, event: Event, proof: Proof = bytes
    ) -> None:
        self._me, self._host, self._port = me, host, port
        self._event, self._proof = event, proof
        self._relays = Relays(relays, self._config, self.learn, self._relay_lost, event)
        self._pipes: weakref.WeakSet[QuicPipe] = weakref.WeakSet()
        self._attempts: dict[PeerId, int] = {}  # dials that failed
        self._endpoint: iroh.Endpoint | None = None
        self._seen: dict[str, list[str]] = {}  # who told it: this endpoint's addresses, the last one last
        self._closing = False
        self._tasks = Tasks(event, lambda name, e: event("task-failed", task=name, text=words(e)))
        self._strangers = 0

    async def start(self, welcome: Welcome, on_pipe: OnPipe) -> None:
        iroh_ffi.uniffi_set_event_loop(asyncio.get_running_loop())  # type: ignore[arg-type]  # BaseEventLoop
        options = iroh.EndpointOptions(
            preset=iroh.preset_minimal(),
            relay_mode=iroh.RelayMode.custom(self._relays.map()),
            bind_addr=f"{self._host or '0.0.0.0'}:{self._port}",
            alpns=[PROTOCOL],
            secret_key=self._me.secret,
        )
        try:
            self._endpoint = await iroh.Endpoint.bind(options)
        except iroh.IrohError as e:
            raise SetupError(f"The UDP port for the swarm cannot be opened ({said(e)}).") from e
        endpoint = self._endpoint
        self._tasks.keep(ACCEPTS, lambda: self._accept(endpoint, welcome, on_pipe), borne=FOR_EVER)
        self._relays.start(self._endpoint)

    async def close(self) -> None:
        """iroh first: the tasks that wait for it end then. Cancelled ones would keep its socket open."""
        self._closing = True
        if self._endpoint is not None:
            with contextlib.suppress(iroh.IrohError, TimeoutError):
                async with asyncio.timeout(1):
                    await self._endpoint.close()
        await self._relays.close()
        await self._tasks.close(patience_s=0.5)
        self._endpoint = None

    def relays(self) -> tuple[str, ...]:
        return self._relays.urls()

    def use_relays(self, urls: tuple[str, ...]) -> None:
        self._relays.use(urls)

    def direct(self) -> tuple[str, ...]:
        """What others have seen first; then what this machine sees itself."""
        if self._endpoint is None:
            return ()
        seen = [at for told in self._seen.values() for at in told]
        own = [at for at in self._endpoint.addr().direct_addresses() if not at.startswith("[")]
        return tuple(dict.fromkeys((*seen, *own)))

    async def learn(self, at: str, by: str) -> None:
        """This endpoint's address as another sees it; iroh offers it to peers, and so punches holes."""
        if self._endpoint is None or not at or at in self._seen.get(by, ()):
            return
        try:
            wire.address_of(at)
            await self._endpoint.add_external_addr(at)
        except (ValueError, iroh.IrohError):
            return
        known = self._seen.setdefault(by, [])
        known.append(at)
        self._event("address_seen", at=at, by=by)
        for old in known[:-1]:
            known.remove(old)
            if not any(old in told for told in self._seen.values()):
                with contextlib.suppress(iroh.IrohError):
                    await self._endpoint.remove_external_addr(old)
        while len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]

    async def dial(self, peer: PeerId, address: Address, greet: Greet, better: bool = False) -> Dialed:
        """`better`: only if it does not need the relay; the other side notices nothing of what was tried."""
        greeting = greet()
        try:
            async with asyncio.timeout(DIAL_S):
                if better:
                    await self._repeat()
                connection = await self._connect(peer, address)
                if better and not await _becomes_direct(connection):
                    connection.close(0, NO_BETTER)
                    raise Broken("only the relay reaches it")
                stream = await connection.open_bi()
                pipe = QuicPipe(connection, stream, MOST_GREETING, "")
                await pipe.send([greeting.encode()])
                verdict = bytes(await pipe.receive())
        except TimeoutError as e:
            raise Broken("no answer in time") from e
        except (iroh.IrohError, BadFrame) as e:
            raise Broken(said(e)) from e
        if verdict[:1] != b"\1":
            pipe.close()
            raise Refused(verdict[1:].decode(errors="replace")[:200] or "no reason given")
        try:
            answer = read_greeting(verdict[1:])
        except Broken:
            pipe.close()
            raise
        self._pipes.add(pipe)
        pipe.limit(MOST_BULK_FRAME if greeting.bulk else MOST_FRAME)
        await self.learn(answer.you_are, peer)
        return Dialed(answer, pipe)

    async def _repeat(self) -> None:
        """iroh punches when it learns of an address: without news it does not try again."""
        assert self._endpoint is not None
        for at in {at for told in self._seen.values() for at in told}:
            await self._endpoint.remove_external_addr(at)
            await self._endpoint.add_external_addr(at)

    async def dial_bulk(self, peer: PeerId, address: Address, greet: Greet) -> Pipe:
        return (await self.dial(peer, address, greet)).pipe

    async def _connect(self, peer: PeerId, address: Address) -> iroh.Connection:
        assert self._endpoint is not None
        to = iroh.EndpointId.from_string(peer)
        failed = self._attempts.get(peer, 0)
        at = iroh.EndpointAddr(to, self._relays.towards(address.relays, failed), list(address.direct))
        try:
            connection = await self._endpoint.connect(at, PROTOCOL)
        except BaseException:  # also when it takes too long: the next one goes through another relay
            self._attempts[peer] = failed + 1
            raise
        connection.set_receive_window(WINDOW)
        return connection

    async def _accept(self, endpoint: iroh.Endpoint, welcome: Welcome, on_pipe: OnPipe) -> None:
        while not self._closing and (incoming := await endpoint.accept_next()) is not None:
            if self._strangers >= MOST_STRANGERS:
                with contextlib.suppress(iroh.IrohError):
                    await incoming.refuse()
                continue
            self._tasks.spawn(self._greet(incoming, welcome, on_pipe))

    async def _greet(self, incoming: iroh.Incoming, welcome: Welcome, on_pipe: OnPipe) -> None:
        self._strangers += 1
        seen = ""
        try:
            async with asyncio.timeout(GREETING_S):
                seen = getattr(await incoming.remote_addr(), "addr", "")  # none where it came through a relay
                connection = await (await incoming.accept()).connect()
                peer = str(connection.remote_id())
                connection.set_receive_window(WINDOW)
                pipe = QuicPipe(connection, await connection.accept_bi(), MOST_GREETING, seen)
                said_first = read_greeting(bytes(await pipe.receive()))
                verdict = welcome(peer, said_first, seen)
                no = isinstance(verdict, str)
                await pipe.send([b"\0" if no else b"\1", verdict.encode()])
                if no:
                    await asyncio.sleep(1)  # a closed connection would take the answer with it
                    pipe.close()
                    return
        except TimeoutError:
            self._event("link_refused", peer="", at=seen or "relay", reason="it did not finish its greeting in time")
        except (Broken, BadFrame, iroh.IrohError) as e:
            if NO_BETTER.decode() not in said(e):
                self._event("link_refused", peer="", at=seen or "relay", reason=said(e))
        else:
            self._pipes.add(pipe)
            pipe.limit(MOST_BULK_FRAME if said_first.bulk else MOST_FRAME)
            on_pipe(peer, said_first, pipe, pipe.way)
        finally:
            self._strangers -= 1

    def _relay_lost(self, url: str) -> None:
        """What went through it is dialed again at once, not after some seconds of silence."""
        for pipe in list(self._pipes):
            if pipe.relay() == url:
                pipe.close()

    def _config(self, url: str) -> iroh.RelayConfig:
        proof = self._proof()
        return iroh.RelayConfig(url=url, quic_port=None, auth_token=token(proof) if proof else None)


async def _becomes_direct(connection: iroh.Connection) -> bool:
    for _ in range(30):
        if any(p.is_selected and not p.is_relay for p in connection.paths()):
            return True
        await asyncio.sleep(0.1)
    return False


def said(e: Exception) -> str:
    """An error of iroh in one line."""
    text = str(e.message() if hasattr(e, "message") else e) or type(e).__name__
    return text.splitlines()[0][:200]
