"""Node 0's side of the talk: admits the agents of the other nodes and keeps what they say until it is asked for."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from dataclasses import dataclass, field

from shoal import wire
from shoal.errors import SetupError
from shoal.guard.nodes.talk import EVERY_S, HELLO, LOST, Line, Message

GOODBYE_S = 5.0


@dataclass(eq=False)
class Node:
    """Another node, connected."""

    number: int
    host: str
    processes: int
    line: Line = field(repr=False)
    came: float = field(default_factory=time.monotonic)
    shares: bool | None = None  # whether it sees node 0's disk; None: it has not looked yet
    leaving: str | None = None  # the signal it was told to leave with

    @property
    def words(self) -> str:
        return f"node {self.number} ({self.host})"


class Head:
    """Listens until closed. `nodes` are those that are connected now; `heard` what they have said since."""

    def __init__(self, port: int, token: bytes, most: int, host: str = "") -> None:
        self._token, self._most = token, most
        self._heard: queue.SimpleQueue[tuple[Node, Message]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._nodes: dict[int, Node] = {}
        try:
            self._server = socket.create_server((host, port), backlog=1024, reuse_port=False)
        except OSError as e:
            raise SetupError(
                f"cannot listen on port {port} for the other nodes ({e.strerror}); another job on this machine may "
                "have it: launch again."
            ) from e
        self.port = int(self._server.getsockname()[1])
        self._over = threading.Event()
        self._code: int | None = None  # once it is over
        self._why = ""
        self._told: set[int] = set()
        threading.Thread(target=self._accepting, name="shoal-head", daemon=True).start()
        threading.Thread(target=self._pinging, name="shoal-ping", daemon=True).start()

    @property
    def nodes(self) -> dict[int, Node]:
        with self._lock:
            return dict(self._nodes)

    def heard(self) -> list[tuple[Node, Message]]:
        """What was said since it was last asked, in order; a node that has gone says `lost` last."""
        said = []
        with contextlib.suppress(queue.Empty):
            while True:
                said.append(self._heard.get_nowait())
        return said

    def tell(self, node: Node, kind: str, **fields: object) -> None:
        """A node that cannot be told is lost, which its reader will say."""
        try:
            node.line.send(kind, **fields)
        except LOST:
            node.line.close()

    def forget(self, node: Node) -> None:
        """It has been sent away."""
        with self._lock:
            if self._nodes.get(node.number) is node:
                del self._nodes[node.number]

    def close(self, code: int, why: str = "") -> None:
        """All of them leave with that exit code, also those that come only now, and say why. They close the connection:
        if this side did, what it has not read yet could take the word with it."""
        if self._over.is_set():
            return
        self._why, self._code = why, code
        for node in self.nodes.values():
            self._dismiss(node)
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline and (self.nodes or len(self._told) < self._most - 1):
            time.sleep(0.02)
        self._over.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _dismiss(self, node: Node) -> None:
        self._told.add(node.number)
        self.tell(node, "over", code=self._code, why=self._why)

    def _accepting(self) -> None:
        while not self._over.is_set():
            try:
                sock, address = self._server.accept()
            except OSError:
                if self._over.is_set():
                    return
                time.sleep(0.1)  # out of descriptors, say: the nodes will try again
                continue
            threading.Thread(target=self._serve, args=(sock, address[0]), name="shoal-node", daemon=True).start()

    def _serve(self, sock: socket.socket, host: str) -> None:
        try:
            sock.settimeout(wire.GREETING_S)
            wire.admit(sock, self._token, HELLO)
            line = Line(sock)
            node = self._admitted(line, line.receive(), host)
        except (*LOST, KeyError, TypeError, ValueError):
            sock.close()  # a stranger, a scanner, or another version
            return
        why = "the connection was closed"
        if self._code is not None:
            self._dismiss(node)
        try:
            while True:
                self._heard.put((node, line.receive()))
        except TimeoutError:
            why = "it has been silent for too long"
        except LOST as e:
            why = str(e) or why
        finally:
            line.close()
            self.forget(node)
            self._heard.put((node, {"kind": "lost", "why": why}))

    def _admitted(self, line: Line, said: Message, host: str) -> Node:
        number = int(said["node"])
        if said.get("kind") != "node" or not 0 < number < self._most:
            raise ValueError(f"there is no node {number}")
        node = Node(number, str(said.get("host") or host), int(said["processes"]), line)
        with self._lock:
            before, self._nodes[number] = self._nodes.get(number), node
        if before is not None:  # its replacement is here before anybody has noticed that it was gone
            before.line.close()
        return node

    def _pinging(self) -> None:
        while not self._over.wait(EVERY_S):
            for node in self.nodes.values():
                self.tell(node, "ping")
