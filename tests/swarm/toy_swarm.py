"""Several nodes in one process, each with a toy trainer in a process of its own, over real links on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import Stopped
from shoal.net.api import Endpoint, Handler, LinkState, Message, PeerId, Unreachable
from shoal.net.endpoint import connect
from shoal.net.identity import Identity
from shoal.spec.run import Run
from shoal.swarm.node import Node

SWARM = "5" * 64
COUNT = 4096
SAID = ("differs", "base", "base-failed", "split", "split-decided", "split-settled")


def spec(**swarm: Any) -> Run:
    swarm = {"peers": 3, "round": "1 s", "deadline": "2 s", "silent": "2 s", "snapshot_every": 3, **swarm}
    train = {"steps": swarm.pop("steps", 4000), "batch": 8}
    return Run.model_validate({"name": "toy", "data": {"train": "none"}, "train": train, "swarm": swarm})


class Cut:
    """An endpoint whose messages to some peers are lost."""

    def __init__(self, inner: Endpoint) -> None:
        self._inner, self.id, self.lost = inner, inner.id, set[PeerId]()

    def on(self, kind: str, handler: Handler, most_body: int = 1 << 20) -> None:
        async def deaf(peer: PeerId, message: Message) -> Message | None:
            if peer in self.lost:
                await asyncio.sleep(3600)
            return await handler(peer, message)

        self._inner.on(kind, deaf, most_body)

    async def ask(self, peer: PeerId, message: Message, timeout_s: float = 10.0, most_body: int = 1 << 20) -> Message:
        if peer in self.lost:
            raise Unreachable("cut")
        return await self._inner.ask(peer, message, timeout_s, most_body)

    def tell(self, peer: PeerId, message: Message) -> None:
        if peer not in self.lost:
            self._inner.tell(peer, message)

    def links(self) -> dict[PeerId, LinkState]:
        return {p: link for p, link in self._inner.links().items() if p not in self.lost}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Peer:
    def __init__(self, folder: Path, identity: Identity, run: Run, steps_per_s: float, attack: str = "") -> None:
        self.folder, self.identity, self.run_spec = folder, identity, run
        self.wrap: Callable[[Any], Any] = lambda endpoint: endpoint  # what stands between the node and its links
        self.command = (
            sys.executable, "-m", "tests.swarm.toy_trainer", str(COUNT), str(steps_per_s), attack,
        )  # fmt: skip
        self.events: list[dict[str, Any]] = []

    async def start(self) -> None:
        inner = connect(self.identity, lambda peer, proof: True, quic=False, host="127.0.0.1")
        await inner.start()
        self.endpoint: Any = self.wrap(Cut(inner))
        self.node = Node(
            self.folder, SWARM, self.identity, self.endpoint, self.run_spec, self.command,
            admitted=lambda peer: True, event=self._event,
        )  # fmt: skip
        self.task = asyncio.create_task(self.node.run())

    def _event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, "t": time.monotonic(), **fields})

    @property
    def me(self) -> PeerId:
        return self.identity.id

    @property
    def round(self) -> int:
        return self.node.chain.head.round

    async def kill(self) -> None:
        """As if the machine had lost power."""
        self.task.cancel()
        if self.node.training.process is not None:
            self.node.training.process.kill()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.task
        await self.endpoint.close()


class Swarm:
    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self.run_spec = folder, run
        self.peers: list[Peer] = []

    async def add(
        self,
        steps_per_s: float = 50.0,
        attack: str = "",
        identity: Identity | None = None,
        wrap: Callable[[Any], Any] = lambda endpoint: endpoint,
    ) -> Peer:
        i = len(self.peers)
        peer = Peer(self.folder / str(i), identity or Identity.new(), self.run_spec, steps_per_s, attack)
        peer.wrap = wrap
        await peer.start()
        self.peers.append(peer)
        self.introduce()
        return peer

    def introduce(self) -> None:
        for a in self.alive:
            for b in self.alive:
                if a is not b:
                    a.endpoint.know(b.me, b.endpoint.address())

    @property
    def alive(self) -> list[Peer]:
        return [p for p in self.peers if not p.task.done()]

    def cut(self, side: list[Peer]) -> None:
        for a in self.alive:
            a.endpoint.lost = {b.me for b in self.alive if (a in side) != (b in side)}

    def heal(self) -> None:
        for peer in self.alive:
            peer.endpoint.lost = set()

    async def until(self, true: Callable[[], bool], within_s: float = 30.0) -> None:
        """`within_s`: on a machine with nothing else to do. What is asked for is that it happens, so a busy one has ten
        times as long before it counts as stuck."""
        end = time.monotonic() + 10 * within_s
        while not true():
            for peer in self.peers:
                wrong = peer.task.exception() if peer.task.done() and not peer.task.cancelled() else None
                if wrong is not None and not isinstance(wrong, Stopped):
                    raise AssertionError("a node has failed") from wrong
            if time.monotonic() > end:
                raise AssertionError(f"not within {within_s} s: {self}")
            await asyncio.sleep(0.05)

    def agree(self) -> bool:
        """All are members of one head, and have the same weights there."""
        heads = {p.node.chain.head.hash for p in self.alive}
        digests = {p.node.work.digests.get(p.node.chain.head.hash) for p in self.alive}
        members = set(self.alive[0].node.chain.head.members)
        return len(heads) == 1 and len(digests) == 1 and None not in digests and members == {p.me for p in self.alive}

    def __str__(self) -> str:
        return "; ".join(
            f"{p.folder.name}: round {p.round} of {len(p.node.chain.head.members)}, {p.node.decider.mode}, "
            f"begun {p.node.work.begun}, weights {p.node.work.digests.get(p.node.chain.head.hash)}, "
            f"last {p.events[-1:]}, {[e for e in p.events if e['kind'] in SAID]}"
            for p in self.alive
        )


@contextlib.asynccontextmanager
async def swarm(folder: Path, peers: int, wrong: Sequence[str] = (), **spec_of: Any) -> AsyncIterator[Swarm]:
    """`wrong`: what is wrong with the first members, in their order. The first one makes the records while all is well;
    of a new swarm, that is who has the smallest key."""
    it = Swarm(folder, spec(peers=peers, **spec_of))
    keys = sorted((Identity.new() for _ in range(peers)), key=lambda identity: identity.id)
    attacks = [*wrong, *[""] * peers]
    try:
        for identity, attack in zip(keys, attacks, strict=False):
            await it.add(attack=attack, identity=identity)
        yield it
    finally:
        for peer in it.alive:
            await peer.kill()
