"""The talk between node 0's agent and the others: JSON messages over one TCP connection each (shoal.wire).

From another node: `node` (who it is), `disk`, `started`, `died`, `pulse`, `log`, `flight`, `island-started`,
`island-ended`, `leaving`, `here`. From node 0: `look`, `start`, `stop`, `kill`, `flight`, `island`, `signal`, `over`,
`ping`.
Either side is taken for lost after a silence.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from typing import Any

from shoal import wire

HELLO = b"shoal agent 1\n"
SILENCE_S = 15.0  # without a word: the other side is lost
EVERY_S = 0.5  # each side says something at least twice in that time
MOST_BYTES = 16 * 2**20

FLEET_HOST = "SHOAL_FLEET_HOST"  # tells an island by which address of its machine the others reach it

Message = dict[str, Any]
LOST = (OSError, wire.Broken)


class Line:
    """One connection. Sending is for any thread; receiving for one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._lock = sock, threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        with self._lock:
            wire.send(self._sock, {"kind": kind, **fields})

    def receive(self) -> Message:
        self._sock.settimeout(SILENCE_S)
        return wire.receive_message(self._sock, MOST_BYTES)

    @property
    def own_address(self) -> str:
        """Of this machine, as the other side reaches it."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unpacked(text: str) -> bytes:
    return base64.b64decode(text)
