"""How a newcomer gets the state: from one rank of a living island to the same rank of the new one.

First a copy of the state as it was between two steps, every tensor with its checksum; then the summed gradient of each
step that was committed since, which the newcomer applies as everybody did. Sent in a thread, while training goes on.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from shoal import values, wire
from shoal.islands.lines import MESSAGE_BYTES, Message
from shoal.parallel.clip import local
from shoal.values import BadValue, items, text, whole

STALL_S = 60.0  # without a byte of progress: the other side is gone, or as good as gone
CHUNK_BYTES = 8 << 20
LOOK_S = 0.1
WAIT_S = 0.5
AHEAD_BYTES, AHEAD = 2 << 30, 3  # gradients that may wait to be sent: so many bytes, and at least so many …
SLOW_S = 4.0  # … with more, training waits for the newcomer, but not for one to which not a byte has gone for so long
PIECE_BYTES = 1 << 20
MOST_KEY, MOST_NOTES = 1024, 1 << 16


@dataclass(frozen=True)
class Entry:
    """A step that was committed after the copy was made."""

    step: int  # from 0
    total: Tensor
    said: list[dict[str, Any]]


class Donor:
    """What a rank gives away. Its methods are the main thread's, but for `asked`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, socket.socket] = {}
        self._gifts: dict[str, _Gift] = {}

    def asked(self, sock: socket.socket, said: Message) -> None:
        """A newcomer's rank wants the state."""
        key = text(said.get("key"), MOST_KEY)
        with self._lock:
            if gift := self._gifts.get(key):
                gift.send_to(sock)
            else:
                self._waiting[key] = sock

    def wanted(self) -> list[str]:
        with self._lock:
            for key in [key for key, sock in self._waiting.items() if _gone(sock)]:
                self._waiting.pop(key).close()
            return list(self._waiting)

    def begin(self, key: str, step: int, tensors: Mapping[str, Tensor], notes: dict[str, Any]) -> None:
        """The state as it is now: `step` steps are applied. `notes`: what belongs to it and is no tensor."""
        gift = _Gift(step, {name: local(t).detach().cpu().clone() for name, t in tensors.items()}, notes)
        with self._lock:
            self._gifts[key] = gift
            if sock := self._waiting.pop(key, None):
                gift.send_to(sock)

    def log(self, step: int, total: Tensor, said: list[dict[str, Any]]) -> None:
        for gift in self._live():
            gift.add(Entry(step, total.clone(), said))

    def finish(self, members: Iterable[str], step: int) -> None:
        """Those who are members now have all they need, once they have applied `step` steps."""
        with self._lock:
            done = {key: self._gifts.pop(key) for key in members if key in self._gifts}
        for gift in done.values():
            gift.end(step)

    def drop(self) -> None:
        """This island is a member no more: what it has begun to give is not of the fleet's state now."""
        with self._lock:
            for gift in self._gifts.values():
                gift.drop()
            for sock in self._waiting.values():
                sock.close()
            self._gifts.clear()
            self._waiting.clear()

    def _live(self) -> list[_Gift]:
        with self._lock:
            self._gifts = {key: gift for key, gift in self._gifts.items() if not gift.broken}
            return list(self._gifts.values())


class _Gift:
    def __init__(self, step: int, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        self._step, self._tensors, self._notes = step, tensors, notes
        self._queue: queue.Queue[Entry | int] = queue.Queue()
        self._moved = time.monotonic()  # when it last made progress
        self._begun = time.monotonic()
        self._sock: socket.socket | None = None
        self.broken = False

    def send_to(self, sock: socket.socket) -> None:
        self._sock = sock
        threading.Thread(target=self._send, args=(sock,), name="fleet-donate", daemon=True).start()

    def add(self, entry: Entry | int) -> None:
        size = entry.total.nbytes if isinstance(entry, Entry) else 0
        while not self.broken and self._queue.qsize() >= max(AHEAD, AHEAD_BYTES // max(size, 1)):
            since = self._begun + STALL_S if self._sock is None else self._moved + SLOW_S
            if time.monotonic() > since:  # nobody comes for it, or whoever came is stopped
                self.drop()
            time.sleep(0.02)
        self._queue.put(entry)

    def end(self, step: int) -> None:
        self.add(step)

    def drop(self) -> None:
        self.broken = True
        with contextlib.suppress(OSError):
            if self._sock:
                self._sock.shutdown(socket.SHUT_RDWR)
        self._queue.put(-1)

    def _send(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(STALL_S)
            table = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in self._tensors.items()]
            wire.send(sock, {"step": self._step, "tensors": table, "notes": self._notes})
            for tensor in self._tensors.values():
                self._send_tensor(sock, tensor)
            self._tensors.clear()
            while isinstance(entry := self._queue.get(), Entry):
                wire.send(sock, {"step": entry.step, "said": entry.said, "count": entry.total.numel()})
                self._send_tensor(sock, entry.total)
            wire.send(sock, {"end": entry})
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)  # until it has read all of it
        except OSError:
            pass  # the newcomer is gone; if it comes back it is another one
        finally:
            self.broken = True
            sock.close()

    def _send_tensor(self, sock: socket.socket, tensor: Tensor) -> None:
        data = _bytes(tensor)
        h = xxhash.xxh3_128()
        for at in range(0, data.nbytes, PIECE_BYTES):
            h.update(data[at : at + PIECE_BYTES])
            sock.sendall(data[at : at + PIECE_BYTES])
            self._moved = time.monotonic()
        sock.sendall(h.digest())


def receive(
    sock: socket.socket,
    tensors: Mapping[str, Tensor],
    loaded: Callable[[int, dict[str, Any]], None],
    idle: Callable[[], None],
    waiting: Callable[[], None],
) -> Iterable[Entry]:
    """Fills the state in place and calls `loaded` with its step and notes; then the steps after it, as they come.

    `waiting` is called until it begins, which is at the other side's next step; `idle` whenever all that has come is
    applied. Either may raise. Raises `wire.Broken` for what is damaged or incomplete.
    """
    while not select.select([sock], [], [], WAIT_S)[0]:
        waiting()
    sock.settimeout(STALL_S)
    head = wire.receive_message(sock, MESSAGE_BYTES)
    own = {name: local(t) for name, t in tensors.items()}
    table = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()]
    if head.get("tensors") != table:
        raise wire.Broken("the other island's state has other tensors")
    with _readable():
        step, notes = whole(head.get("step")), values.table(head.get("notes"), MOST_NOTES)
    for tensor in own.values():
        tensor.copy_(_receive_tensor(sock, torch.empty(tensor.shape, dtype=tensor.dtype)))
    loaded(step, notes)
    most = sum(tensor.numel() for tensor in own.values())  # a gradient has no more numbers than the state
    while True:
        wait_s = 0.0
        while not select.select([sock], [], [], wait_s)[0]:
            idle()
            wait_s = LOOK_S
        head = wire.receive_message(sock, MESSAGE_BYTES)
        if "end" in head:
            return
        with _readable():
            step, count = whole(head.get("step")), whole(head.get("count"), most)
            said = [values.table(one, MOST_NOTES) for one in items(head.get("said"), MOST_NOTES)]
        yield Entry(step, _receive_tensor(sock, torch.empty(count)), said)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except BadValue as e:
        raise wire.Broken(f"no state of an island: {e}") from None


def _gone(sock: socket.socket) -> bool:
    """Whether the other side has closed it; it says nothing otherwise."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _receive_tensor(sock: socket.socket, into: Tensor) -> Tensor:
    data = _bytes(into)
    h = xxhash.xxh3_128()
    for at in range(0, data.nbytes, CHUNK_BYTES):
        wire.receive_into(sock, data[at : at + CHUNK_BYTES])
        h.update(data[at : at + CHUNK_BYTES])
    if wire.receive(sock, h.digest_size) != h.digest():
        raise wire.Broken("what has come is not what was sent")
    return into


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
