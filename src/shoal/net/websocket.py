"""WebSocket frames as a server sees them (RFC 6455), for many clients in bounded memory.

The library `websockets` is right for a few connections, but each message passes through several objects, tasks and
queues there: a relay of it moved 150 to 480 Mbit/s (2026-11). Here a client has one buffer that never grows, frames
are read where they lie, and only the mask is undone by the library's native code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator

from shoal.errors import needs_extra

try:
    from websockets.frames import apply_mask
except ImportError as e:
    raise needs_extra("websockets", "swarm", "A relay") from e

CONTINUED, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
_MOST_HEADER = 14


class BadFrame(ValueError):
    """With the code that the client is told (RFC 6455, 7.4.1)."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def accept_key(key: str) -> str:
    return base64.b64encode(hashlib.sha1(key.encode("latin-1") + _GUID).digest()).decode()


def header(opcode: int, size: int) -> bytes:
    """Of a frame that a server sends."""
    if size < 126:
        return bytes((0x80 | opcode, size))
    if size < 1 << 16:
        return bytes((0x80 | opcode, 126)) + size.to_bytes(2, "big")
    return bytes((0x80 | opcode, 127)) + size.to_bytes(8, "big")


class Inbox:
    """What has come from a client and is not a whole message yet. `most`: bytes of a message."""

    def __init__(self, most: int) -> None:
        self._start = self._end = 0
        self._parts: list[bytes] = []  # of a message in several frames
        self._opcode = 0
        self._buffer = bytearray()
        self.grow(most)

    def grow(self, most: int) -> None:
        """Longer messages from now on."""
        held = self._buffer[self._start : self._end]
        self._most = most
        self._buffer = bytearray(2 * (most + _MOST_HEADER))
        self._view = memoryview(self._buffer)
        self._buffer[: len(held)] = held
        self._start, self._end = 0, len(held)

    def room(self) -> memoryview:
        """Where the next bytes belong. There is always some: a frame takes at most half of the buffer."""
        if self._end > len(self._buffer) // 2:
            rest = self._end - self._start
            self._buffer[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

    def filled(self, count: int) -> Iterator[tuple[int, bytes]]:
        """So many bytes have come; (opcode, content) of each message that is whole with them."""
        self._end += count
        while (found := self._frame()) is not None:
            opcode, final, content = found
            if opcode >= CLOSE:
                if not final or len(content) > 125:
                    raise BadFrame(1002, "a control frame that is too long or in parts")
                yield opcode, content
                continue
            if (opcode == CONTINUED) != bool(self._opcode):
                raise BadFrame(1002, "a frame that continues nothing, or a message within another")
            if final and opcode != CONTINUED:
                yield opcode, content
                continue
            self._opcode = self._opcode or opcode
            self._parts.append(content)
            if sum(map(len, self._parts)) > self._most or len(self._parts) > 64:
                raise BadFrame(1009, "a message that is too long")
            if final:
                opcode, content = self._opcode, b"".join(self._parts)
                self._opcode, self._parts = 0, []
                yield opcode, content

    def _frame(self) -> tuple[int, bool, bytes] | None:
        buffer, at, end = self._buffer, self._start, self._end
        if end - at < 2:
            return None
        first, size = buffer[at], buffer[at + 1]
        at += 2
        if first & 0x70 or (opcode := first & 15) not in (CONTINUED, TEXT, BINARY, CLOSE, PING, PONG):
            raise BadFrame(1002, "a frame of an unknown kind")
        if not size & 0x80:
            raise BadFrame(1002, "a frame without a mask")
        size &= 0x7F
        if size > 125:
            wide = 2 if size == 126 else 8
            if end - at < wide:
                return None
            size = int.from_bytes(buffer[at : at + wide], "big")
            at += wide
        if size > self._most:
            raise BadFrame(1009, f"a frame of {size} bytes")
        at += 4
        if end < at + size:
            return None
        content = apply_mask(self._view[at : at + size], bytes(buffer[at - 4 : at]))
        self._start = at + size
        if self._start == end:
            self._start = self._end = 0
        return opcode, bool(first & 0x80), content
