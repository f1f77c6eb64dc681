"""What peers and relays send: frames, messages in them, websockets, handshakes, greetings."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.raw_bytes import damaged, spliced
from tests.fuzz.reader import Finding, Target, reader
from tests.fuzz.samples import identity, no_infinity, texts_of


@reader("frames", "net.frames", quick=1500, share=1000)
def frames(folder: Path) -> Target:
    from shoal.net import frames as f
    from shoal.net.api import Message

    fields = {"a": 1, "b": [1.5, None, "x"], "c": {"d": True}}
    samples = [
        b"".join(map(bytes, parts))
        for parts in (
            f.head("ask", 7, Message("pulse", fields)),
            f.head("answer", 8, Message("part", fields, b"body")),
            f.piece("tell", 9, 1 << 20, b"x" * 40),
            *(f.refuse("ask", 1, "no"), f.stop("answer", 2), f.beat(3, 1.5, 1e6, True), f.more(), f.bye("end")),
        )
    ]
    head = samples[0][:17]

    def generate(rng: Random) -> bytes:
        roll = rng.random()
        if roll < 0.4:  # right lengths, wrong content
            text = encoded(mutated(rng, ["pulse", fields]))
            return head[:5] + len(text).to_bytes(4, "big") + bytes(8) + text
        return spliced(rng, samples) if roll < 0.5 else damaged(rng, rng.choice(samples), head=20)

    return Target(generate, f.parse, (f.BadFrame,))


@reader("websocket", "net.websocket", quick=1500, share=600)
def websocket(folder: Path) -> Target:
    from shoal.net.websocket import BadFrame, Inbox

    def frame(opcode: int, content: bytes, final: bool = True) -> bytes:
        size = len(content)
        wide = bytes((0x80 | size,)) if size < 126 else bytes((0xFE,)) + size.to_bytes(2, "big")
        return bytes((final << 7 | opcode,)) + wide + b"abcd" + content

    samples = [
        frame(2, b"x" * 30) + frame(9, b"ping"),
        frame(2, b"y" * 200, False) + frame(0, b"z" * 10),
        frame(1, b"text") + frame(8, b"\x03\xe8"),
    ]

    def generate(rng: Random) -> bytes:
        data = b"".join(rng.choice(samples) for _ in range(rng.randrange(1, 4)))
        return damaged(rng, data, head=12)

    def read(data: bytes) -> None:
        inbox, at = Inbox(1000), 0
        while at < len(data):
            room = inbox.room()
            count = min(len(room), len(data) - at, 700)
            room[:count] = data[at : at + count]
            at += count
            for _, content in inbox.filled(count):
                if len(content) > 1000:
                    raise Finding("a message over the limit")

    return Target(generate, read, (BadFrame,))


@reader("greeting", "net.pipe", quick=1000, share=500)
def greeting(folder: Path) -> Target:
    from shoal.net.api import Address
    from shoal.net.pipe import Broken, Greeting, read_greeting

    good = json.loads(
        Greeting("b" * 8, "l" * 8, True, Address(("http://r",), ("1.2.3.4:5",), ()), "1.2.3.4:9", b"p").encode()
    )

    def read(data: bytes) -> None:
        found = read_greeting(data)
        if read_greeting(found.encode()) != found:
            raise Finding("a greeting that is another after a round trip")

    return Target(texts_of(good), read, (Broken,))


@reader("places", "net.seek", "net.relays", quick=400, share=200)
def places(folder: Path) -> Target:
    """Where a peer says that another is, and where a relay says that its rendezvous is."""
    from shoal.net.api import Message
    from shoal.net.relays import read_rendezvous
    from shoal.net.seek import read_place
    from shoal.values import BadValue, read_json

    good = ({"at": "1.2.3.4:5000"}, {"rendezvous": {"id": "a" * 64, "addr": "1.2.3.4:5"}})

    def read(data: bytes) -> None:
        if b"rendezvous" in data:
            read_rendezvous(data)
        elif isinstance(said := read_json(data), dict):  # an endpoint gives no other fields to a reader
            read_place(Message("place", said))

    return Target(texts_of(*good), read, (BadValue,), (ValueError,))


@reader("secure", "net.secure", "net.tcp", "net.identity", quick=150, share=10)
def secure(folder: Path) -> Target:
    """The handshake over a stream whose bytes are changed on their way, as the side that listens sees it."""
    from shoal.net.pipe import Broken
    from shoal.net.secure import HELLO, answer

    me, loop = identity(1), asyncio.new_event_loop()
    good = HELLO + bytes(range(32)) + (180).to_bytes(2, "big") + bytes(180)

    class Writer:
        def write(self, data: bytes) -> None: ...

        async def drain(self) -> None: ...

    async def listen(data: bytes) -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        await answer(stream, Writer(), me, lambda peer, greeting: "no")  # type: ignore[arg-type]

    def read(data: bytes) -> None:
        loop.run_until_complete(asyncio.wait_for(listen(data), 5))
        raise Finding("a stranger without a key has been let in")

    return Target(lambda rng: damaged(rng, good, head=60), read, (Broken,), refuses_all=True)


@reader("wire", "wire", quick=500, share=100)
def wire(folder: Path) -> Target:
    from shoal.wire import Broken, receive_message

    good = {"for": "status", "key": "k", "n": 5, "list": [1, {"a": None}]}

    def generate(rng: Random) -> bytes:
        text = encoded(mutated(rng, good))
        whole = len(text).to_bytes(4, "big") + text
        return whole if rng.random() < 0.6 else damaged(rng, whole, head=8)

    def read(data: bytes) -> None:
        class Socket:
            at = 0

            def recv_into(self, into: memoryview) -> int:
                part = data[self.at : self.at + len(into)]
                into[: len(part)] = part
                self.at += len(part)
                return len(part)

        message = receive_message(Socket(), 1 << 16)  # type: ignore[arg-type]
        no_infinity(message)

    return Target(generate, read, (Broken,))


@reader("wire-address", "wire", quick=300, share=100)
def wire_address(folder: Path) -> Target:
    from shoal.wire import address_of

    good = ("1.2.3.4:80", "[::1]:443", "host.name:65535")
    return Target(
        lambda rng: mutated(rng, rng.choice(good), 2),
        lambda text: address_of(text) if isinstance(text, str) else None,
        (),
        (ValueError,),
    )


@reader("relay-token", "net.relay", quick=500, share=200)
def relay_token(folder: Path) -> Target:
    from shoal.net.relay import proof_of, token

    good = {"peer": "a" * 64, "seq": 3, "admission": {"signature": "s"}}

    def generate(rng: Random) -> str:
        text = token(encoded(mutated(rng, good)))
        if rng.random() < 0.5:
            return text
        return damaged(rng, text.encode()).decode("utf-8", "surrogateescape")

    return Target(generate, proof_of)


@reader("relay-answers", "net.relays", "net.punch", quick=30, share=5)
def relay_answers(folder: Path) -> Target:
    """What a relay answers over HTTP, over real sockets: `/watch` (its rendezvous) and `/info` (where we are seen)."""
    from shoal.net import punch, relays
    from shoal.net.pipe import Broken

    loop = asyncio.new_event_loop()
    watch = {"rendezvous": {"id": "a" * 64, "addr": "1.2.3.4:5"}}
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"

    def generate(rng: Random) -> bytes:
        good: Any = rng.choice((watch, {"you": "1.2.3.4:5"}))
        whole = head + encoded(mutated(rng, good)) + b"\n"
        return whole if rng.random() < 0.6 else damaged(rng, whole, head=len(head))

    async def ask(data: bytes) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readline()
                writer.write(data)
                await writer.drain()
            except OSError:
                pass
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            try:
                door = await punch.door(url)
                door.close()
            except Broken:
                pass
            async with relays._opened(url):
                pass
        finally:
            server.close()

    # Whoever calls `_opened` takes every one of these for a relay that is no relay.
    return Target(generate, lambda data: loop.run_until_complete(ask(data)), (), (OSError, ValueError, TimeoutError))


@reader("relay-client", "net.relay_client", quick=100, share=10)
def relay_client(folder: Path) -> Target:
    """A connection to a relay: HTTP, then websocket frames, given to the protocol as a socket would."""
    from shoal.net.relay import Relay
    from shoal.net.relay_client import Client

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    upgrade = (
        b"GET /relay HTTP/1.1\r\nHost: r\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Protocol: iroh-relay-v1\r\n\r\n"
    )
    ask = b"GET /info HTTP/1.1\r\nHost: r\r\n\r\n"
    frame = bytes((0x82, 0x80 | 40)) + b"abcd" + bytes(range(40))

    class Socket:
        def setsockopt(self, *option: int) -> None: ...

    class Transport(asyncio.Transport):
        closed = False

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return {"peername": ("127.0.0.1", 1234), "sockname": ("127.0.0.1", 1), "socket": Socket()}.get(
                name, default
            )

        def write(self, data: bytes) -> None: ...

        def writelines(self, parts: Any) -> None: ...

        def close(self) -> None:
            self.closed = True

        abort = close

        def is_closing(self) -> bool:
            return self.closed

        def get_write_buffer_size(self) -> int:
            return 0

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

        def pause_reading(self) -> None: ...

        def resume_reading(self) -> None: ...

    def generate(rng: Random) -> bytes:
        return damaged(rng, rng.choice((upgrade, ask)) + frame * rng.randrange(3), head=len(upgrade))

    async def talk(data: bytes) -> None:
        relay = Relay("127.0.0.1", 0)
        client, transport = Client(relay), Transport()
        client.connection_made(transport)
        at = 0
        while at < len(data) and not transport.closed:
            room = client.get_buffer(-1)
            count = min(len(room), len(data) - at)
            room[:count] = data[at : at + count]  # type: ignore[index]
            client.buffer_updated(count)
            at += count
        client.connection_lost(None)

    return Target(generate, lambda data: loop.run_until_complete(talk(data)))


@reader("quic-frames", "net.quic", quick=300, share=50)
def quic_frames(folder: Path) -> Target:
    """The stream of a QUIC connection, cut into frames."""
    from shoal.net.frames import BadFrame
    from shoal.net.quic import QuicPipe

    loop = asyncio.new_event_loop()
    good = b"".join(len(part).to_bytes(4, "big") + part for part in (b"one", b"two" * 20, b"three" * 50))

    def read(data: bytes) -> None:
        pipe = QuicPipe.__new__(QuicPipe)
        pipe._buffer, pipe._most = bytearray(data), 1 << 10

        async def fill(count: int) -> None:
            if len(pipe._buffer) < count:
                raise EOFError("the stream has ended")

        pipe._fill = fill  # type: ignore[method-assign]
        with suppress(EOFError):
            while True:
                loop.run_until_complete(pipe.receive())

    return Target(lambda rng: damaged(rng, good, head=4), read, (BadFrame,))
