"""A pipeline of toys: real endpoints on loopback, and a model whose gradients can be worked out by hand.

A stage is one number w; hidden states are x·w, the loss is half the square of what comes out. Gradients are summed in
float64, and parts travel whole, so that every layout must give the weights of one process to the last digits.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest

from shoal.net.api import PeerId
from shoal.net.endpoint import Peers, connect
from shoal.net.identity import Identity
from shoal.stages.lead import Lead
from shoal.stages.peer import Peer
from shoal.stages.report import Measured
from shoal.stages.routes import Commit, Layout, Sums
from shoal.values import BadValue

LR = 0.05
HELD_OUT = 1000  # the step whose data is held out
Make = Callable[[int, PeerId], Any]


def deal_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As to peers that are as fast as each other. One that a busy machine held up for a moment would get nothing to do,
    and what a test waits for in it never happen."""
    monkeypatch.setattr(Lead, "_seconds", lambda self: {})


class Toy:
    """Implements `shoal.stages.work.Work`."""

    message_bytes = part_bytes = state_bytes = 64
    sets = 1
    held_out = 0

    def __init__(self, stage: int, stages: int, micro_batches: int, disk: dict[int, float]) -> None:
        self.stage, self.last, self.micro_batches = stage, stage == stages - 1, micro_batches
        self.disk = disk
        self.told: list[Sums] = []
        self.w = self._first()
        self.before: Callable[[str, int], None] = lambda what, m: None
        self.step = 0
        self.begin(0)

    def _first(self) -> float:
        return 1.0 + 0.1 * self.stage

    def begin(self, step: int) -> None:
        self.step = step
        self.grads: dict[int, float] = {}
        self.inputs: dict[int, float] = {}
        self.losses: dict[int, float] = {}

    def forward(self, m: int, message: bytes | None) -> bytes | None:
        self.before("forward", m)
        x = data(self.step, m) if message is None else _number(message)
        self.inputs[m] = x
        if not self.last:
            return _bytes(x * self.w)
        out = x * self.w
        self.losses[m] = out * out / 2
        self.grads[m] = out * x
        return _bytes(out * self.w) if self.stage else None

    def backward(self, m: int, message: bytes) -> bytes | None:
        self.before("backward", m)
        assert m not in self.grads, f"micro-batch {m} is counted twice"
        g = _number(message)
        self.grads[m] = g * self.inputs[m]
        return _bytes(g * self.w) if self.stage else None

    def check(self, kind: str, payload: bytes | memoryview) -> None:
        if len(payload) != 8 or not math.isfinite(_number(bytes(payload))):
            raise BadValue(f"no number of a toy ({kind})")

    def part(self) -> bytes:
        return _bytes(sum(self.grads[m] for m in sorted(self.grads)))

    def total(self, parts: list[bytes] | None) -> float:
        self.sum = sum(map(_number, parts)) if parts is not None else _number(self.part())
        return self.sum**2

    def loss(self) -> float:
        return sum(self.losses.values())

    def factor(self, step: int, squares: float, loss: float) -> Commit:
        return Commit(step, 1 / self.micro_batches, loss / self.micro_batches, squares**0.5)

    def apply(self, commit: Commit) -> None:
        self.w -= LR * commit.factor * self.sum

    def measure(self, m: int, message: bytes | None) -> tuple[bytes | None, Measured | None]:
        self.before("measure", m)
        out = (data(HELD_OUT, m) if message is None else _number(message)) * self.w
        return (None, (m, out * out / 2, 1)) if self.last else (_bytes(out), None)

    def add_up(self, sums: Sums | None, step: int, measured: list[Measured]) -> Sums:
        before = (0.0, 0) if sums is None else (sums.losses[0], sums.targets[0])
        return Sums(step, (before[0] + sum(loss for _, loss, _ in measured),), (before[1] + len(measured),))

    def tell(self, sums: Sums) -> None:
        self.told.append(sums)

    def digest(self) -> str:
        return f"{self.w:.12g}"

    def state(self) -> bytes:
        return _bytes(self.w)

    def restore(self, step: int, state: bytes) -> None:
        self.check("state", state)
        self.w = _number(state)

    def save(self, step: int) -> None:
        self.disk[step] = self.w

    def saved(self) -> list[int]:
        return [0, *self.disk]

    def load(self, step: int) -> None:
        self.w = self.disk[step] if step else self._first()


def data(step: int, m: int) -> float:
    return 0.5 + 0.1 * ((7 * step + 3 * m) % 5)


def alone(stages: int, micro_batches: int, steps: int) -> tuple[list[float], list[float]]:
    """The same in one process: (weights, losses)."""
    w = [1.0 + 0.1 * s for s in range(stages)]
    losses = []
    for step in range(steps):
        grads, loss = [0.0] * stages, 0.0
        for m in range(micro_batches):
            product = data(step, m)
            for each in w:
                product *= each
            loss += product**2 / 2 / micro_batches
            for s in range(stages):
                grads[s] += product * product / w[s] / micro_batches
        losses.append(loss)
        w = [each - LR * g for each, g in zip(w, grads, strict=True)]
    return w, losses


class Pond:
    """The peers of a pipeline in this process, each with a real endpoint of its own."""

    def __init__(
        self, counts: list[int], micro_batches: int, steps: int, make: Make | None = None, silent_s: float = 10.0
    ) -> None:
        """`make`: the work of a peer of a stage; a toy otherwise."""
        self.held_out = 0  # of toys
        self.evaluates: Callable[[int], bool] = lambda step: False
        self.due: Callable[[int], bool] = lambda step: step % 3 == 0
        self.ids = [[Identity.new() for _ in range(n)] for n in counts]
        self.layout: Layout = tuple(tuple(i.id for i in stage) for stage in self.ids)
        self.micro_batches, self.steps, self.make, self.silent_s = micro_batches, steps, make, silent_s
        self.endpoints: dict[PeerId, Peers] = {}
        self.peers: dict[PeerId, Peer] = {}
        self.toys: dict[PeerId, Toy] = {}
        self.works: dict[PeerId, Any] = {}
        self.tasks: dict[PeerId, asyncio.Task[None]] = {}
        self.disks: dict[PeerId, dict[int, float]] = {p: {} for stage in self.layout for p in stage}
        self.events: list[tuple[PeerId, str, dict[str, Any]]] = []

    async def start(self, peer: PeerId) -> None:
        stage, identity = next((s, i) for s, ids in enumerate(self.ids) for i in ids if i.id == peer)
        endpoint = connect(
            identity, lambda p, proof: p in self.disks, host="127.0.0.1", quic=False, silent_s=self.silent_s
        )
        await endpoint.start()
        for other, there in self.endpoints.items():
            endpoint.know(other, there.address())
            there.know(peer, endpoint.address())
        work: Any
        if self.make is None:
            work = self.toys[peer] = Toy(stage, len(self.layout), self.micro_batches, self.disks[peer])
            work.held_out = self.held_out
        else:
            work = self.make(stage, peer)
        note = lambda kind, **fields: self.events.append((peer, kind, fields))  # noqa: E731
        settings: dict[str, Any] = {"silent_s": self.silent_s, "due": self.due, "evaluates": self.evaluates}
        self.endpoints[peer], self.works[peer] = endpoint, work
        self.peers[peer] = Peer(endpoint, self.layout, work, self.steps, event=note, **settings)

    def run(self, peer: PeerId) -> None:
        self.tasks[peer] = asyncio.create_task(self.peers[peer].run())

    async def kill(self, peer: PeerId) -> None:
        """Its connections break off in the middle of whatever they carry."""
        task, endpoint = self.tasks.pop(peer), self.endpoints.pop(peer)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await endpoint.close()

    async def lose(self, peer: PeerId) -> None:
        """Killed, its disk is empty, and the others have been without a word of it for long."""
        await self.kill(peer)
        self.disks[peer].clear()
        entries = [endpoint._peers[peer] for endpoint in self.endpoints.values()]
        await self.until(lambda: not any(entry.carriers for entry in entries))
        for entry in entries:
            entry.heard_s = None

    async def close(self) -> None:
        for peer in list(self.tasks):
            await self.kill(peer)

    def seen(self, kind: str) -> list[dict[str, Any]]:
        return [fields for _, k, fields in self.events if k == kind]

    async def until(self, true: Callable[[], bool], within_s: float = 600.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():
                for task in self.tasks.values():
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)


def _bytes(x: float) -> bytes:
    return struct.pack("<d", x)


def _number(data: bytes) -> float:
    return float(struct.unpack("<d", data)[0])
