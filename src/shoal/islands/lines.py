"""Connections between islands: both sides prove that they know the run's token, then one says what it is for."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shoal import wire
from shoal.islands.cut import may_cut, refuse_if_cut
from shoal.values import BadValue

HELLO = b"shoal fleet 1\n\0\0"
Message = dict[str, Any]
Handler = Callable[[socket.socket, Message], None]  # it has a thread of its own, and owns the socket
MESSAGE_BYTES = 1 << 24
CONNECT_S = 3.0
MOST_STRANGERS = 256  # that may be at the greeting at a time; each has a thread and a socket
T = TypeVar("T")
WITHIN = "rank"  # a connection between two ranks of one island


class Server:
    """Listens, and hands each connection to the handler of what it is for."""

    def __init__(self, host: str, token: bytes, handlers: Mapping[str, Handler]) -> None:
        self._token, self._handlers = token, handlers
        self._room, self._closed = threading.BoundedSemaphore(MOST_STRANGERS), False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = may_cut(socket.create_server((host, 0), family=family, backlog=128))
        self.address = wire.text_of(self._socket.getsockname())
        threading.Thread(target=self._accept, name="fleet-accept", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed; or there are no more files now, which is no reason never to listen again
                time.sleep(0.1)
                continue
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="fleet-serve", daemon=True).start()
            except RuntimeError:  # the system gives no more threads
                self._room.release()
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            said = self._admit(sock)
        finally:
            self._room.release()
        if said is None:
            return
        try:
            self._handlers[said["for"]](sock if said["for"] == WITHIN else may_cut(sock), said)
        except BadValue:  # what it asks for makes no sense: it sees that nobody answers
            sock.close()

    def _admit(self, sock: socket.socket) -> Message | None:
        """What a friend wants; None for a stranger."""
        try:
            wire.admit(sock, self._token, HELLO)
            sock.settimeout(wire.GREETING_S)
            said = wire.receive_message(sock, MESSAGE_BYTES)
            if str(said.get("for")) not in self._handlers:
                raise wire.Broken("a connection for what is not known here")
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            return None
        return said


def connect(address: str, token: bytes, said: Message, timeout_s: float = CONNECT_S) -> socket.socket:
    if said.get("for") != WITHIN:
        refuse_if_cut()
    sock = socket.create_connection(wire.address_of(address), timeout=timeout_s)
    try:
        wire.greet(sock, token, HELLO, min(timeout_s, wire.GREETING_S))
        wire.send(sock, said)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if said.get("for") == WITHIN else may_cut(sock)


def ask(address: str, token: bytes, said: Message, read: Callable[[Message], T], timeout_s: float = CONNECT_S) -> T:
    """One question, and what `read` makes of the answer. OSError where nobody answers in time, or `read` raises
    `BadValue`: an answer that cannot be read is none."""
    with connect(address, token, said, timeout_s) as sock:
        sock.settimeout(timeout_s)
        reply = wire.receive_message(sock, MESSAGE_BYTES)
    try:
        return read(reply)
    except BadValue as e:
        raise wire.Broken(f"an answer to {said.get('for')!r} that is none: {e}") from None


def answer(sock: socket.socket, message: Message) -> None:
    """To `ask`. Whether it arrives is the other's business."""
    with sock, contextlib.suppress(OSError):
        wire.send(sock, message)


class Line:
    """A lasting connection that both sides talk on. `heard` is called in a thread of its own, `closed` once, last."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def follow(self, heard: Callable[[Message], None], closed: Callable[[], None]) -> None:
        """Reads until the end, here and now."""
        try:
            while True:
                heard(wire.receive_message(self._sock, MESSAGE_BYTES))
        except (OSError, BadValue):  # what makes no sense ends it, as if it had been closed
            pass
        finally:
            self.close()
            closed()

    def say(self, message: Message) -> None:
        """Messages are small: they fit into the system's buffer, so a peer that has stopped does not hold us up."""
        with self._sending, contextlib.suppress(OSError):
            wire.send(self._sock, message)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
