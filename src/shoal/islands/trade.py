"""Sums the gradients of all islands: each rank trades with the ranks of the same number on the other islands.

Piece j of the vector goes to member j, who adds up what all have sent and sends the sum to everybody: the bytes of a
ring in two trips, and the same bits on every island. In the header of what it sends each member says what it is (which
shards, how many tokens, which loss), so everybody learns that on the way.

All connections are served by one thread without waiting for any single one, and whoever is told that the epoch is over
leaves at once: neither a dead nor a stopped peer can hold it up.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.spec.island_sums import Forest, Node, path
from shoal.values import BadValue, items, read_object, table, whole

_LENGTH = struct.Struct("!I")
MOST_HEADER_BYTES = 1 << 24
MOST_SAID = 256  # fields
BUFFER_BYTES = 4 << 20  # of a socket; the system may allow less


class Gone(ConnectionError):
    """A member has closed its connection, or broken the rules."""

    def __init__(self, member: int, why: str) -> None:
        super().__init__(why)
        self.member = member


class Over(Exception):
    """The epoch has ended while this was under way."""


@dataclass(frozen=True)
class Offer:
    """What a member brings to a trade: sums of gradients by nodes of the shard tree, and what it says about them.

    In the usual mode there is one vector, and its node means nothing.
    """

    nodes: Sequence[Node]
    vectors: Sequence[Tensor]  # flat, float32, on the CPU, all of the same length
    says: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Traded:
    total: Tensor
    said: list[dict[str, Any]]  # by member


@dataclass
class _Peer:
    member: int
    sock: socket.socket
    out: deque[memoryview] = field(default_factory=deque)
    into: deque[memoryview] = field(default_factory=deque)  # what is to be filled next
    then: deque[Callable[[], None]] = field(default_factory=deque)  # what happens when that is full
    said: dict[str, Any] | None = None
    done: bool = False


class Trader:
    """The connections of one rank in one epoch."""

    def __init__(
        self,
        me: int,
        peers: Mapping[int, socket.socket],
        wake: socket.socket | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`peers` by member, without me. A byte on `wake` says to ask whether the epoch `is_over`."""
        self._me, self._members, self._is_over = me, len(peers) + 1, is_over
        self._selector = selectors.DefaultSelector()
        self._peers = {member: _Peer(member, sock) for member, sock in peers.items()}
        self._buffers: dict[tuple[int, int, int], Tensor] = {}
        for peer in self._peers.values():
            peer.sock.setblocking(False)
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                peer.sock.setsockopt(socket.SOL_SOCKET, side, BUFFER_BYTES)
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        if wake is not None:
            self._selector.register(wake, selectors.EVENT_READ)

    def sum(self, step: int, mine: Offer, total: Tensor, shards: int | None, patience_s: float) -> Traded:
        """Adds up what all members bring, into `total`. `shards`: in the tree over so many of them, not as it comes.

        Raises `Gone` for a member that has left or that sends nothing for `patience_s`, and `Over`.
        """
        bounds = [total.numel() * i // self._members for i in range(self._members + 1)]
        piece = total[bounds[self._me] : bounds[self._me + 1]]
        adder = _Adder(self._members, shards, piece)
        said: dict[int, dict[str, Any]] = {self._me: dict(mine.says)}
        adder.bring(self._me, mine.nodes, [v[bounds[self._me] : bounds[self._me + 1]] for v in mine.vectors])

        def finish() -> None:
            """My piece is summed: to everybody with it."""
            if adder.ready():
                for peer in self._peers.values():
                    self._send(peer, _bytes(piece))

        def expect(peer: _Peer) -> None:
            head = bytearray(_LENGTH.size)
            peer.into.append(memoryview(head))
            peer.then.append(lambda: header(peer, _LENGTH.unpack(head)[0]))

        def header(peer: _Peer, length: int) -> None:
            if length > MOST_HEADER_BYTES:
                raise Gone(peer.member, f"sent a header of {length} bytes")
            text = bytearray(length)
            peer.into.append(memoryview(text))
            peer.then.append(lambda: pieces(peer, text))

        def pieces(peer: _Peer, text: bytearray) -> None:
            nodes, said[peer.member] = _parsed(peer.member, text, step, shards)
            parts = [self._buffer(peer.member, i, piece.numel()) for i in range(len(nodes))]
            if not parts:
                brought(peer, nodes, parts)
                return
            peer.into.extend(_bytes(part) for part in parts)
            peer.then.extend([_nothing] * (len(parts) - 1))
            peer.then.append(lambda: brought(peer, nodes, parts))

        def brought(peer: _Peer, nodes: list[Node], parts: list[Tensor]) -> None:
            adder.bring(peer.member, nodes, parts)
            finish()
            peer.into.append(_bytes(total[bounds[peer.member] : bounds[peer.member + 1]]))
            peer.then.append(lambda: setattr(peer, "done", True))

        head = {"step": step, "nodes": [list(node) for node in mine.nodes], "says": mine.says}
        text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        for peer in self._peers.values():
            peer.done = False
            expect(peer)
            low, high = bounds[peer.member], bounds[peer.member + 1]
            self._send(peer, memoryview(_LENGTH.pack(len(text)) + text), *(_bytes(v[low:high]) for v in mine.vectors))
        finish()  # where there is nobody else
        self._serve(patience_s)
        return Traded(total, [said[member] for member in range(self._members)])

    def close(self) -> None:
        self._selector.close()
        for peer in self._peers.values():
            peer.sock.close()

    def _serve(self, patience_s: float) -> None:
        last = dict.fromkeys(self._peers, time.monotonic())
        while waiting := [p for p in self._peers.values() if p.out or not p.done]:
            for key, events in self._selector.select(timeout=0.5):
                if key.data is None:
                    self._woken(key.fileobj)
                    continue
                peer: _Peer = key.data
                try:
                    moved = bool(events & selectors.EVENT_WRITE) and self._write(peer)
                    moved |= bool(events & selectors.EVENT_READ) and self._read(peer)
                except OSError as e:
                    raise e if isinstance(e, Gone) else Gone(peer.member, str(e)) from e
                if moved:
                    last[peer.member] = time.monotonic()
            silent = [p.member for p in waiting if time.monotonic() - last[p.member] > patience_s]
            if silent:
                raise Gone(silent[0], f"sent nothing for {patience_s:g} s")

    def _woken(self, wake: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            wake.recv(4096)
        if self._is_over():
            raise Over

    def _send(self, peer: _Peer, *data: memoryview) -> None:
        peer.out.extend(d for d in data if d.nbytes)
        if peer.out:
            self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _write(self, peer: _Peer) -> bool:
        sent = 0
        while peer.out:
            try:
                n = peer.sock.send(peer.out[0])
            except BlockingIOError:
                break
            sent += n
            peer.out[0] = peer.out[0][n:]
            if not peer.out[0].nbytes:
                peer.out.popleft()
        if not peer.out:
            self._selector.modify(peer.sock, selectors.EVENT_READ, peer)
        return sent > 0

    def _read(self, peer: _Peer) -> bool:
        got = 0
        while peer.into:
            if peer.into[0].nbytes:
                try:
                    n = peer.sock.recv_into(peer.into[0])
                except BlockingIOError:
                    break
                if not n:
                    raise Gone(peer.member, "has closed the connection")
                got += n
                peer.into[0] = peer.into[0][n:]
            if not peer.into[0].nbytes:
                peer.into.popleft()
                peer.then.popleft()()
        if not got and not peer.into:  # nothing is expected, so this is its end
            with contextlib.suppress(BlockingIOError):
                raise Gone(peer.member, "sent too much" if peer.sock.recv(1, socket.MSG_PEEK) else "has left")
        return got > 0

    def _buffer(self, member: int, i: int, count: int) -> Tensor:
        key = (member, i, count)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(count)
        return self._buffers[key]


class _Adder:
    """Adds up one piece of the vector: in the order of the members, or in the tree."""

    def __init__(self, members: int, shards: int | None, piece: Tensor) -> None:
        self._members, self._piece = members, piece
        self._forest = None if shards is None else Forest[Tensor](shards, lambda a, b: a.add_(b))
        self._brought: dict[int, Sequence[Tensor]] = {}
        self._added = 0  # members
        self._begun = False

    def bring(self, member: int, nodes: Sequence[Node], parts: Sequence[Tensor]) -> None:
        self._brought[member] = parts
        if self._forest is not None:
            for node, part in zip(nodes, parts, strict=True):
                # What is mine is needed again if the epoch breaks; what came from others is in buffers of this trade.
                self._forest.plant(node, part.clone())
            return
        while self._added in self._brought:  # as far as the order allows
            for part in self._brought[self._added]:
                self._piece.add_(part) if self._begun else self._piece.copy_(part)
                self._begun = True
            self._added += 1

    def ready(self) -> bool:
        """Whether all have brought theirs; the piece is the sum then."""
        if len(self._brought) < self._members:
            return False
        if self._forest is not None:
            root = self._forest.root()
            if root is None:
                raise AssertionError(f"the members' shards are not all of them: {sorted(self._forest.sums)}")
            self._piece.copy_(root)
        return True


def _parsed(member: int, text: bytearray, step: int, shards: int | None) -> tuple[list[Node], dict[str, Any]]:
    """What it brings, and what it says of it."""
    try:
        head = read_object(bytes(text))
        at, says = whole(head.get("step")), table(head.get("says"), MOST_SAID)
        nodes = [_node(node, shards) for node in items(head.get("nodes"), 1 if shards is None else shards)]
    except BadValue as e:
        raise Gone(member, f"sent a header that cannot be understood ({e})") from None
    if at != step:
        raise Gone(member, f"is at step {at} where this one is at {step}")
    return nodes, says


def _node(said: object, shards: int | None) -> Node:
    """Of the tree over the shards; without one it means nothing."""
    low, high = [*items(said, 2), None, None][:2]
    node = whole(low), whole(high)
    if shards is not None and (node[0] >= shards or node not in path(node[0], shards)):
        raise BadValue("a node of no tree of ours")
    return node


def _bytes(vector: Tensor) -> memoryview:
    if not vector.numel():
        return memoryview(b"")
    return memoryview(vector.numpy().data).cast("B")


def _nothing() -> None: ...
