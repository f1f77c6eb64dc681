"""One connection to a relay: a few requests by HTTP, or an iroh endpoint that proves its key and sends packets.

What iroh's clients speak (iroh-relay-v1 and v2, read in its sources, 2026-11): binary WebSocket messages whose first
byte says what they are. The server sends a challenge; the client signs it with its key; then packets name the key
they are for, and arrive with the key they are from. Contents are QUIC, encrypted between the two ends: a relay sees
who talks to whom and how much, and no more.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

from shoal import wire
from shoal.errors import needs_extra
from shoal.net.identity import verify
from shoal.net.relay_room import OWN, Room
from shoal.net.websocket import BINARY, CLOSE, PING, PONG, BadFrame, Inbox, accept_key, header

try:
    from blake3 import blake3
except ImportError as e:
    raise needs_extra("blake3", "swarm", "A relay") from e

CHALLENGE, AUTH, CONFIRM, DENY = 0, 1, 2, 3
PACKET, PACKETS, FROM_OTHER = 4, 5, 2  # what arrives as 4 or 5 leaves as 6 or 7
GONE, ASK, ANSWER, STATUS = 8, 9, 10, 13
ANOTHER_HAS_THE_KEY = 1
KEY = 32
MOST_PACKET = 64 << 10  # iroh's own limit
MOST_MESSAGE = MOST_PACKET + 128
MOST_PROOF = 512  # of a message before a key is proven: nobody gets a large buffer for nothing
MOST_REQUEST = 16 << 10  # a token may hold a whole proof
MOST_QUEUE = 2 << 20  # waiting for a client; what does not fit is dropped, as a router would
MOST_ANSWERS = 64  # control frames waiting for a client that does not read
MOST_KNOWN = 1024  # keys a client has sent to, which are told when it is gone
QUICK_S = 10.0  # for a connection to say what it wants and to prove its key
ASK_S = 15.0
SILENT_S = 40.0
STALLED_S = 40.0  # a client for which something waits, and that takes nothing of it
WATCH_S = 4.0  # between two signs of life
_PROTOCOLS = ("iroh-relay-v2", "iroh-relay-v1")
_CONTEXT = "iroh-relay handshake v1 challenge signature"


class Server(Protocol):
    """What a connection needs of the relay it belongs to."""

    room: Room

    def opened(self, client: Client) -> bool: ...

    def refusal(self, key: bytes, token: str) -> str: ...

    def joined(self, client: Client) -> None: ...

    def left(self, client: Client) -> None: ...

    def deliver(self, client: Client, kind: int, to: bytes, rest: bytes) -> None: ...

    def info(self, client: Client, host: str) -> dict[str, Any]: ...

    def odd(self, client: Client, why: str) -> None: ...


class Client(asyncio.BufferedProtocol):
    def __init__(self, server: Server) -> None:
        self.key = b""  # once it is proven
        self.known: set[bytes] = set()
        self.protocol = ""
        self.host = self.where = ""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox | None = None  # None: still HTTP
        self._request = bytearray()
        self._small = memoryview(bytearray(MOST_REQUEST))
        self._token = ""
        self._challenge = b""
        self._out: list[bytes] = []
        self._out_bytes = self._counted = self._answers = 0
        self._put_bytes = self._taken_bytes = 0  # for the client, and by it, since the beginning
        self._watching = False
        self._took = self._loop.time()
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.host, port = (transport.get_extra_info("peername") or ("gone", 0))[:2]
        self.where = wire.text_of((self.host, port))
        sock = transport.get_extra_info("socket")
        for level, option, value in _OPTIONS:
            with suppress(OSError):  # a kernel that lacks it
                sock.setsockopt(level, option, value)
        transport.set_write_buffer_limits(high=OWN, low=0)
        self._timer = self._loop.call_later(QUICK_S, self._too_slow)
        if not self._server.opened(self):
            self._reply(503, b"The relay is full.\n")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport, self._out, self._out_bytes = None, [], 0
        self._count()
        self._server.left(self)

    def pause_writing(self) -> None:
        self._count()

    def resume_writing(self) -> None:
        """All that waited has gone: others may have the room."""
        self._count()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._small if self._inbox is None else self._inbox.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = self._loop.time()
        if self._watching:
            # Each request would be answered into a queue, and a client that never reads would fill it.
            self._server.odd(self, "a request after /watch")
            self._abort()
            return
        if self._inbox is None:
            self._request += self._small[:nbytes]
            self._read_request()
            return
        try:
            for opcode, content in self._inbox.filled(nbytes):
                self._message(opcode, content)
                if self._transport is None or self._transport.is_closing():
                    return
        except BadFrame as e:
            self._server.odd(self, str(e))
            self.close(e.code)

    def close(self, code: int = 1000) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self._inbox is not None:
                self._send(CLOSE, code.to_bytes(2, "big"))
                self._flush()
            self._transport.close()
            # A client that does not read would keep it open with what still waits.
            self._loop.call_later(QUICK_S, self._transport.abort)

    def address_here(self) -> str:
        """Under which it has reached this machine."""
        return str(self._transport.get_extra_info("sockname")[0]) if self._transport is not None else ""

    # HTTP

    def _read_request(self) -> None:
        head, ended, rest = self._request.partition(b"\r\n\r\n")
        if len(head) > MOST_REQUEST or (not ended and len(self._request) > MOST_REQUEST):
            self._server.odd(self, "a request that is too long")
            self._reply(431, b"")
            return
        if not ended:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, _, path = first.rpartition(" ")[0].partition(" ")
        path = path.partition("?")[0]
        self._request.clear()
        if method != "GET":
            self._reply(405, b"")
        elif path == "/relay":
            self._upgrade(fields, bytes(rest))
        elif rest:
            self._server.odd(self, "more than a request")
            self._abort()
        elif path in ("/info", "/watch"):
            told = json.dumps(self._server.info(self, fields.get("host", ""))).encode() + b"\n"
            if path == "/info":
                self._reply(200, told, "application/json")
            else:
                self._watch(told)
        elif path in ("/ping", "/generate_204"):
            asked = fields.get("x-iroh-challenge", "")  # a network that answers for others would not know it
            extra = (
                f"X-Iroh-Response: response {asked}\r\n" if asked.replace("-", "").replace("_", "").isalnum() else ""
            )
            self._reply(200 if path == "/ping" else 204, b"", extra=extra)
        elif path == "/":
            self._reply(200, b"A relay for swarms of Shoal. /info says more.\n")
        else:
            self._reply(404, b"")

    def _reply(self, status: int, body: bytes, kind: str = "text/plain", extra: str = "") -> None:
        assert self._transport is not None
        told = f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}"
        told += "Access-Control-Allow-Origin: *\r\nConnection: close\r\n\r\n"
        self._transport.write(told.encode("latin-1") + body)
        self._transport.close()

    def _watch(self, told: bytes) -> None:
        """Stays open, so that a client knows within moments that the relay is gone; iroh takes 45 s to tell."""
        assert self._transport is not None
        assert self._timer is not None
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
        self._transport.write(head.encode("latin-1") + told)
        self._timer.cancel()
        self._watching = True
        self._timer = self._loop.call_later(WATCH_S, self._still_here)

    def _still_here(self) -> None:
        if self._transport is None or self._transport.get_write_buffer_size():  # it does not read
            self._abort()
            return
        self._transport.write(b"\n")
        self._timer = self._loop.call_later(WATCH_S, self._still_here)

    def _upgrade(self, fields: dict[str, str], rest: bytes) -> None:
        offered = [name.strip() for name in fields.get("sec-websocket-protocol", "").split(",")]
        self.protocol = next((name for name in _PROTOCOLS if name in offered), "")
        key = fields.get("sec-websocket-key", "")
        if fields.get("upgrade", "").lower() != "websocket" or not key or not self.protocol:
            self._server.odd(self, "an upgrade to something else")
            self._reply(426, f"This speaks WebSocket with {' or '.join(_PROTOCOLS)}.\n".encode())
            return
        assert self._transport is not None
        self._token = fields.get("authorization", "").removeprefix("Bearer ").strip()
        told = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        told += f"Sec-WebSocket-Accept: {accept_key(key)}\r\nSec-WebSocket-Protocol: {self.protocol}\r\n\r\n"
        self._transport.write(told.encode("latin-1"))
        if len(rest) > MOST_PROOF:
            self._server.odd(self, "more than a proof of a key")
            self._abort()
            return
        self._inbox = Inbox(MOST_PROOF)
        self._challenge = os.urandom(16)
        self._send(BINARY, bytes((CHALLENGE,)) + self._challenge)
        if rest:
            self._inbox.room()[: len(rest)] = rest
            self.buffer_updated(len(rest))

    # The relay's protocol

    def _message(self, opcode: int, content: bytes) -> None:
        if opcode == BINARY and content:
            kind = content[0]
            if not self.key:
                self._authenticate(kind, content)
            elif kind in (PACKET, PACKETS) and len(content) > 1 + KEY + (1 if kind == PACKET else 3):
                self._server.deliver(self, kind + FROM_OTHER, content[1 : 1 + KEY], content[1 + KEY :])
            elif kind == ASK and len(content) == 9:
                self._control(BINARY, bytes((ANSWER,)) + content[1:])
            elif kind != ANSWER:
                raise BadFrame(1002, f"a message of kind {kind}, {len(content)} bytes")
        elif opcode == PING:
            self._control(PONG, content)
        elif opcode == CLOSE:
            self.close()
        elif opcode != PONG:
            raise BadFrame(1003, "a message that is empty or text")

    def _authenticate(self, kind: int, content: bytes) -> None:
        key, signature = content[1 : 1 + KEY], content[-64:]
        signed = blake3(self._challenge, derive_key_context=_CONTEXT).digest()
        if kind != AUTH or not 1 + KEY + 64 <= len(content) <= 1 + KEY + 64 + 2:
            raise BadFrame(1002, "no proof of a key")
        why = "the signature is wrong" if not verify(key.hex(), signed, signature) else ""
        why = why or self._server.refusal(key, self._token)
        if why:
            told = why.encode()[:100]
            self._server.odd(self, why)
            self._send(BINARY, bytes((DENY, len(told))) + told)
            self.close(1008)
            return
        self.key = key
        assert self._inbox is not None
        self._inbox.grow(MOST_MESSAGE)
        self._send(BINARY, bytes((CONFIRM,)))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(ASK_S, self._ask)
        self._server.joined(self)

    def packet(self, kind: int, sender: bytes, rest: bytes) -> bool:
        """Whether there was room for it. Never waits: who does not read loses packets, and nobody else does."""
        size = 1 + KEY + len(rest)
        if self._transport is None or self._transport.is_closing():
            return False
        waiting = self._count()
        if waiting + size > MOST_QUEUE or not self._server.room.fits(self.host, waiting, size):
            return False
        self._put(header(BINARY, size) + bytes((kind,)) + sender, rest)
        return True

    def gone(self, key: bytes) -> None:
        self._control(BINARY, bytes((GONE,)) + key)

    def replaced(self) -> None:
        """Another connection has the same key, and gets its packets from now on."""
        if self.protocol == "iroh-relay-v2":
            self._control(BINARY, bytes((STATUS, ANOTHER_HAS_THE_KEY)))

    def _control(self, opcode: int, content: bytes) -> None:
        self._answers = self._answers + 1 if self._count() else 1
        if self._answers <= MOST_ANSWERS:
            self._send(opcode, content)

    def _count(self) -> int:
        """What waits for this client, as the relay's room is told."""
        waiting = self._waiting()
        self._server.room.move(self.host, self._counted, waiting)
        taken = self._put_bytes - waiting
        if not waiting or taken > self._taken_bytes:
            self._took = self._loop.time()
        self._counted, self._taken_bytes = waiting, taken
        return waiting

    def _waiting(self) -> int:
        return self._out_bytes + (self._transport.get_write_buffer_size() if self._transport is not None else 0)

    def _send(self, opcode: int, content: bytes) -> None:
        self._put(header(opcode, len(content)), content)

    def _put(self, *parts: bytes) -> None:
        if not self._out:  # what comes in one turn of the loop leaves with one call of the kernel
            self._loop.call_soon(self._flush)
        self._out += parts
        size = sum(map(len, parts))
        self._out_bytes += size
        self._put_bytes += size
        self._count()

    def _flush(self) -> None:
        if self._transport is not None and self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out, self._out_bytes = [], 0

    def _ask(self) -> None:
        now = self._loop.time()
        if self._count() and now - self._took > STALLED_S:
            self._server.odd(self, f"nothing that waits for it was taken for {STALLED_S:g} s")
            self._abort()
            return
        if now - self._heard > SILENT_S:
            self._abort()
            return
        self._control(BINARY, bytes((ASK,)) + os.urandom(8))
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def _too_slow(self) -> None:
        self._server.odd(self, f"nothing was proven within {QUICK_S:g} s")
        self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


_WORDS = {
    200: "OK",
    204: "No Content",
    404: "Not Found",
    405: "Method Not Allowed",
    426: "Upgrade Required",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def _options() -> Iterable[tuple[int, int, int | bytes]]:
    yield socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    if hasattr(socket, "TCP_CONGESTION"):  # loss is no sign of a full link out there
        yield socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr"
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # packets wait here, where they are counted, not in the kernel
        yield socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 256 << 10


_OPTIONS = tuple(_options())
