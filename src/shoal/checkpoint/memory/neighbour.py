"""Another node's memory: read from it, and send it a copy of one's own. The other end is that node's keeper."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from shoal import wire
from shoal.checkpoint.memory.generations import Generation, seal_extra
from shoal.checkpoint.names import Name
from shoal.errors import TransientError

HELLO = b"shoal keeper 1\n\0"
REQUEST_BYTES, REPLY_BYTES = 1 << 12, 1 << 26  # at most; a reply may list thousands of ranks
CONNECT_S = 5.0
STALL_S = 15.0  # without a byte: the other side is gone, or as good as gone
PREPARE_S = 60.0  # for the keeper to find room: a hundred gigabytes take a while
SLOWEST_BYTES_PER_S = 20e6  # a copy that takes longer than this comes too late to be of use
_CHUNK_BYTES = 4 << 20
Taken = TypeVar("Taken")


class Peer:
    """The keeper at an address, for reading. Connections are made when needed, one for each read at a time.

    What a keeper does not have is FileNotFoundError. One that is gone, or that does not answer, is another OSError: the
    next copy, or the next tier, will do.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self.address, self._token = address, token
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    @property
    def where(self) -> str:
        return f"the keeper at {self.address}"

    def kept(self) -> dict[Name, Generation]:
        def take(sock: socket.socket, reply: dict[str, Any]) -> dict[Name, Generation]:
            return {
                Name(int(step), int(term)): Generation({int(rank): int(size) for rank, size in ranks}, bool(extra))
                for step, term, ranks, extra in reply["kept"]
            }

        return self._ask({"do": "list"}, take)

    def part(self, name: Name, rank: int) -> bytes:
        return self._ask({"do": "part", "step": name.step, "term": name.term, "rank": rank}, _take_bytes)

    def extra(self, name: Name) -> bytes:
        return self._ask({"do": "extra", "step": name.step, "term": name.term}, _take_bytes)

    def read_into(self, name: Name, rank: int, at: int, into: memoryview) -> None:
        def take(sock: socket.socket, reply: dict[str, Any]) -> None:
            wire.receive_into(sock, into)

        ask = {"do": "read", "step": name.step, "term": name.term, "rank": rank, "at": at, "count": into.nbytes}
        self._ask(ask, take)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _ask(self, message: dict[str, Any], take: Callable[[socket.socket, dict[str, Any]], Taken]) -> Taken:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        try:
            if idle is not None:
                try:
                    return self._exchange(idle, message, take)
                except ConnectionError:  # keepers close what is idle for long
                    pass
            return self._exchange(connect(self.address, self._token), message, take)
        except (FileNotFoundError, EOFError, _Refused):
            raise
        except (OSError, KeyError, TypeError, ValueError) as e:
            raise _gone(self.where, e) from e

    def _exchange(
        self, sock: socket.socket, message: dict[str, Any], take: Callable[[socket.socket, dict[str, Any]], Taken]
    ) -> Taken:
        try:
            wire.send(sock, message)
            reply = wire.receive_message(sock, REPLY_BYTES)
            if "error" not in reply:
                taken = take(sock, reply)
        except BaseException:
            sock.close()  # nobody knows what would come next
            raise
        with self._lock:
            self._idle.append(sock)
        if "error" in reply:
            raise _error(reply)
        return taken


def replicate(
    address: str, token: bytes, name: Name, rank: int, world: int, file: memoryview, part: bytes, extra: bytes | None
) -> None:
    """Sends a rank's file to the keeper of the next node, which checks every byte; `TransientError` if that fails.

    `part` is `encode_part`'s, `extra` is JSON, of rank 0 alone. Takes bounded time. The file may be overwritten
    meanwhile: then its checksums do not match, and the keeper drops it.
    """
    until = time.monotonic() + PREPARE_S + file.nbytes / SLOWEST_BYTES_PER_S
    sealed_extra = b"" if extra is None else seal_extra(extra)
    ask = {
        "do": "copy", "step": name.step, "term": name.term, "rank": rank, "world": world,
        "bytes": file.nbytes, "part": len(part), "extra": len(sealed_extra),
    }  # fmt: skip
    try:
        with connect(address, token) as sock:
            wire.send(sock, ask)
            sock.sendall(part + sealed_extra)
            sock.settimeout(PREPARE_S)
            _raise_if_refused(wire.receive_message(sock, REPLY_BYTES))
            sock.settimeout(STALL_S)
            for at in range(0, file.nbytes, _CHUNK_BYTES):
                if time.monotonic() > until:
                    raise TimeoutError(errno.ETIMEDOUT, "it takes the bytes too slowly")
                sock.sendall(file[at : at + _CHUNK_BYTES])
            _raise_if_refused(wire.receive_message(sock, REPLY_BYTES))
    except OSError as e:
        why = e if isinstance(e, _Refused) else _gone(f"the keeper at {address}", e)
        raise TransientError(f"the snapshot of step {name.step} has no copy on another node: {why.strerror}.") from e


def connect(address: str, token: bytes) -> socket.socket:
    sock = socket.create_connection(wire.address_of(address), CONNECT_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.greet(sock, token, HELLO)
        sock.settimeout(STALL_S)
    except BaseException:
        sock.close()
        raise
    return sock


class _Refused(OSError):
    """The keeper's own sentence."""


def _raise_if_refused(reply: dict[str, Any]) -> None:
    if "error" in reply:
        raise _error(reply)


def _error(reply: dict[str, Any]) -> OSError | EOFError:
    words = str(reply["error"])
    if reply.get("kind") == "missing":
        return FileNotFoundError(errno.ENOENT, words)
    return EOFError(words) if reply.get("kind") == "short" else _Refused(errno.EIO, words)


def _gone(who: str, e: Exception) -> OSError:
    why = getattr(e, "strerror", None) or str(e) or type(e).__name__
    return OSError(errno.EIO, f"{who} does not answer ({why})")


def _take_bytes(sock: socket.socket, reply: dict[str, Any]) -> bytes:
    return wire.receive(sock, int(reply["bytes"]))
