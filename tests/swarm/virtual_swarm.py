"""A swarm in one process and in virtual time: real nodes, links in memory, toy trainers that draw no chance of their
own. The same peers at the same times make the same history, to the last bit."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from shoal.net.api import Message, PeerId
from shoal.net.identity import Identity
from shoal.swarm import messages
from shoal.swarm.lies import said_bytes
from shoal.swarm.node import Node
from shoal.swarm.trainer_words import read
from shoal.values import BadValue
from tests.islands.nonsense import Bus, End, Made, Nonsense
from tests.swarm.toy_swarm import SWARM, spec
from tests.swarm.toy_trainer import Toy, target

COUNT = 256
STEP_S = 0.05


class InProcess(Toy):
    """The toy, without a process: its node calls it, and its words go through the reader of its node."""

    def __init__(self, node: Node, number: int) -> None:
        self.folder, self.link, self.node = node.folder, self, node
        self.rounds, self.carried, self.parts = [], [], {}
        self.count, self.step_s, self.apply_s, self.attack, self.outer = COUNT, STEP_S, 0.0, "", None
        self.goal, self.rng = target(COUNT), np.random.default_rng(number)
        self._said: deque[dict[str, Any]] = deque()
        self._task: asyncio.Task[None] | None = None

    # As a `Link`.

    def send(self, **message: Any) -> None:
        word = read(json.dumps(message, allow_nan=False).encode())
        assert word is not None
        asyncio.get_running_loop().call_soon(self.node.training._heard, word)

    def next(self, wait_s: float) -> dict[str, Any] | None:
        return self._said.popleft() if self._said else None

    # As a `Trainer`.

    async def start(self) -> None:
        self.say(kind="ready", params=self.count)
        self._task = asyncio.create_task(self._train())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def kill(self) -> None: ...

    def say(self, message: dict[str, Any] | None = None, **said: Any) -> None:
        """Of the node, or of the toy."""
        if message is not None:
            self._said.append(json.loads(json.dumps(message)))
        else:
            self.send(**said)

    def step(self, one: dict[str, Any]) -> None:
        self.take(one, 1)
        noise = self.rng.normal(size=self.count).astype(np.float32)
        self.weights += 0.02 * (self.goal - self.weights) + 0.01 * noise

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            self.hear()
            if self.rounds and self.is_over(self.rounds[0]):
                self.hand_in(self.rounds.pop(0))
            elif self.rounds and self.rounds[0]["left"]:
                self.step(self.rounds[0])


class Member:
    def __init__(self, bus: Bus, folder: Path, number: int, wrong: str = "", **spec_of: Any) -> None:
        """`wrong`: "answers", or "all" that it says."""
        self.key, self.events = Identity(bytes([number]) * 32), list[dict[str, Any]]()
        made = Made(number, drip_s=60.0 if wrong == "answers" else 0.0)
        self.end: Any = End(bus, self.key.id)
        if wrong:
            self.end = Nonsense(self.end, made, self._signed(made) if wrong == "all" else None)
        self.node = Node(
            folder / str(number), SWARM, self.key, self.end, spec(peers=5, robust=False, **spec_of), None,
            admitted=lambda peer: True, event=self._event,
        )  # fmt: skip
        if wrong != "all":
            self.node.training.process = InProcess(self.node, number)  # type: ignore[assignment]
        self.task: asyncio.Task[int] | None = None

    def _signed(self, made: Made) -> Any:
        """It signs what it says: nobody can say that it came from somebody else. No word of it is one by chance: that
        it wants to be a member, say."""

        def say(message: Message) -> Message:
            while True:
                body = bytes(made.of(message).body)[: 32 << 10]
                try:
                    messages.read(message.kind, body)
                except BadValue:
                    break
            signature = self.key.sign(said_bytes(SWARM, message.kind, body)).hex()
            return Message(message.kind, {"signature": signature}, body)

        return say

    def _event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] in kinds]

    @property
    def id(self) -> PeerId:
        return self.key.id

    async def start(self) -> None:
        await self.end.start()
        self.task = asyncio.create_task(self.node.run())

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.end.close()
