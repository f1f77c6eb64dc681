"""Islands on several nodes: their agents are started by the agents of the nodes, and go on when node 0 is gone.

A node that comes back, or finds node 0 again, says which islands it still has; those are taken over as they are.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from shoal.errors import TRANSIENT
from shoal.guard.island_agents import Handle, HandsHere
from shoal.guard.nodes.head import Head, Node

KILLED = -int(signal.SIGKILL)


@dataclass(eq=False)
class Far:
    """The agent of an island on another node."""

    hands: NodeHands = field(repr=False)
    node: Node
    island: int
    pid: int = 0
    code: int | None = None

    def poll(self) -> int | None:
        self.hands.hear()
        return self.code

    def send_signal(self, sig: int) -> None:
        self.hands.head.tell(self.node, "signal", island=self.island, number=int(sig))

    def wait(self) -> int:
        """It was killed; whether that is heard makes no difference any more."""
        deadline = time.monotonic() + 2.0
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return TRANSIENT if self.code is None else self.code


@dataclass(eq=False)
class NodeHands:
    """Island i is on node i modulo their number, so that a node has the same ones whenever it comes."""

    head: Head
    here: HandsHere
    nodes: int
    run: str
    _far: dict[int, Far] = field(default_factory=dict)
    _left: set[int] = field(default_factory=set)

    def start(self, island: int) -> Handle | None:
        number = island % self.nodes
        if number == 0:
            return self.here.start(island)
        self.hear()
        node = self.head.nodes.get(number)
        if node is None or node.leaving is not None:
            return None
        self._left.discard(island)
        far = self._far[island] = Far(self, node, island)
        self.head.tell(node, "island", island=island, run=self.run)
        return far

    def left(self, island: int) -> bool:
        return island in self._left

    def hear(self) -> None:
        for node, said in self.head.heard():
            match said["kind"]:
                case "leaving":
                    node.leaving = str(said.get("signal"))
                case "lost":
                    self._gone(node)
                case "disk":
                    node.shares = bool(said["shared"])
                case "island-started" if (far := self._of(node, said["island"])) is not None:
                    far.pid = int(said["pid"])
                case "island-ended" if (far := self._of(node, said["island"])) is not None:
                    far.code = int(said["code"])
                    if node.leaving is not None:
                        self._left.add(far.island)
        for node in self.head.nodes.values():
            alive = any(far.node is node and far.code is None for far in self._far.values())
            if node.leaving is not None and not alive:  # its islands have left in order
                self.head.tell(node, "over", code=143)
                self.head.forget(node)

    def _gone(self, node: Node) -> None:
        for far in self._far.values():
            if far.node is node and far.code is None:
                far.code = KILLED
                self._left.add(far.island)

    def _of(self, node: Node, island: int) -> Far | None:
        far = self._far.get(int(island))
        return far if far is not None and far.node is node else None
