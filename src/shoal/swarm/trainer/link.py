"""The line between a trainer and its node: small JSON objects, a line each, over a Unix socket. docs/decisions/038.

A thread reads, so that what the node says is never waited for while a step runs. When the line is gone the node is, and
the trainer ends: without a node its work reaches nobody.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from shoal.values import MOST_ITEMS, BadValue, read_object, text

Message = dict[str, Any]
CONNECT_S = 30.0
MOST_LINE = 256 << 20


class Gone(ConnectionError):
    """The node has closed the line."""


class Link:
    """`send` may be called by any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()
        self._heard: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="shoal-swarm-link", daemon=True).start()

    @classmethod
    def to(cls, path: Path) -> Link:
        """The node listens before it starts a trainer; a little patience costs nothing."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(path))
            except OSError:
                sock.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return cls(sock)

    def send(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}, allow_nan=False).encode() + b"\n"
        with self._lock:
            try:
                self._sock.sendall(line)
            except OSError as e:
                raise Gone(f"the node is gone: {e}") from None

    def next(self, wait_s: float) -> Message | None:
        """What the node said next; None when it says nothing for so long. Raises Gone at the end of the line."""
        try:
            message = self._heard.get(timeout=wait_s) if wait_s > 0 else self._heard.get_nowait()
        except queue.Empty:
            return None
        if message is None:
            self._heard.put(None)
            raise Gone("the node is gone")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self) -> None:
        """A line that is no message ends it as its end would: what comes after it cannot be trusted."""
        with contextlib.suppress(OSError, BadValue), self._sock.makefile("rb") as lines:
            while line := lines.readline(MOST_LINE):
                message = read_object(line, most_parts=MOST_ITEMS, most_bytes=MOST_LINE)
                text(message.get("kind"), 64)
                self._heard.put(message)
        self._heard.put(None)
