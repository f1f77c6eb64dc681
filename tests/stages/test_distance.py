"""What distance and rate cost a pipeline, in a clock that jumps: the real peers and lead, over links that take the time
that an ideal link would. The same on every machine, however busy; `benchmarks/swarm_stages.py` is the real thing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from shoal.net.api import Address, Handler, LinkState, Message, PeerId
from shoal.stages.inbox import Inbox
from shoal.stages.peer import Peer
from tests.slow import some_slow
from tests.stages.toy import Toy

T = TypeVar("T")
STAGES, STEPS = 4, 5


class Jumping(selectors.DefaultSelector):
    """Instead of waiting until the next timer, it is then."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


@dataclass
class Ideal:
    """A peer's end of links that lose nothing: its messages leave one after the other at its rate, and arrive later."""

    id: PeerId
    others: dict[PeerId, Ideal]
    bytes_per_s: float
    one_way_s: float
    free_at: float = 0.0

    def __post_init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.others[self.id] = self

    def on(self, kind: str, handler: Handler, most_body: int = 1 << 20) -> None:
        self.handlers[kind] = handler

    async def ask(self, peer: PeerId, message: Message, timeout_s: float = 10.0, most_body: int = 1 << 20) -> Message:
        await self.sent(message)
        answer = await self.others[peer].handlers[message.kind](self.id, message)
        assert answer is not None
        await self.others[peer].sent(answer)
        return answer

    async def sent(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        self.free_at = max(loop.time(), self.free_at) + (200 + len(message.body)) / self.bytes_per_s
        await asyncio.sleep(self.free_at + self.one_way_s - loop.time())

    def links(self) -> dict[PeerId, LinkState]:
        return {p: LinkState(p, "tcp", heard_s=0.0) for p in self.others if p != self.id}

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def address(self) -> Address:
        return Address()

    def know(self, peer: PeerId, address: Address) -> None: ...

    def forget(self, peer: PeerId) -> None: ...

    def tell(self, peer: PeerId, message: Message) -> None: ...


class Large(Toy):
    """Messages of a given size."""

    def __init__(self, stage: int, micro_batches: int, size: int) -> None:
        super().__init__(stage, STAGES, micro_batches, {})
        self.message_bytes = size

    def forward(self, m: int, message: bytes | None) -> bytes | None:
        return self._padded(super().forward(m, None if message is None else message[:8]))

    def backward(self, m: int, message: bytes) -> bytes | None:
        return self._padded(super().backward(m, message[:8]))

    def check(self, kind: str, payload: bytes | memoryview) -> None:
        super().check(kind, payload if kind == "part" else payload[:8])

    def _padded(self, message: bytes | None) -> bytes | None:
        return None if message is None else message.ljust(self.message_bytes)


class Unthreaded(Inbox):
    async def _check(self, peer: PeerId, message: Message) -> None:
        self._peer.work.check(message.kind, message.body)  # in no thread: the clock would not wait for it


class Timed(Peer):
    forward_s = backward_s = 0.0

    async def compute(self, do: Callable[..., T], *args: Any) -> T:
        takes = {"forward": self.forward_s + (self.backward_s if self.last else 0.0), "backward": self.backward_s}
        await asyncio.sleep(takes.get(getattr(do, "__name__", ""), 0.0))
        return do(*args)


def step_s(micro_batches: int, size: int, compute_s: float, bytes_per_s: float, one_way_s: float) -> float:
    """Of the last steps of four stages with one peer each."""
    clock = Jumping()
    took: list[float] = []

    def note(kind: str, **fields: Any) -> None:
        if kind == "step":
            took.append(clock.now)

    def nothing(kind: str, **fields: Any) -> None: ...

    async def main() -> None:
        ends: dict[PeerId, Ideal] = {}
        layout = tuple((f"{s}" * 64,) for s in range(STAGES))
        peers = []
        for s, (peer,) in enumerate(layout):
            end = Ideal(peer, ends, bytes_per_s, one_way_s)
            one = Timed(end, layout, Large(s, micro_batches, size), STEPS, event=note if s == 0 else nothing)
            one.inbox = Unthreaded(one)
            one.forward_s, one.backward_s = compute_s / 3, compute_s * 2 / 3
            peers.append(one)
        await asyncio.gather(*(peer.run() for peer in peers))

    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    return (took[-1] - took[0]) / (len(took) - 1)


# An 8B model over four peers, 1,024 tokens a micro-batch: numbers that travel of each token, TFLOP/s, micro-batches.
SIZES = [(4096, 20, 24), (512, 100, 64), (64, 470, 128)]


@pytest.mark.parametrize(("width", "tflops", "micro_batches"), some_slow(SIZES, slow=SIZES[1:]))
def test_at_100_mbit_and_100_ms_a_step_takes_at_most_half_longer(width: int, tflops: int, micro_batches: int) -> None:
    compute_s = 6 * 1.75e9 * 1024 / (tflops * 1e12)
    size = 1024 * width * 130 // 128
    near = step_s(micro_batches, size, compute_s, 1e9, 50e-6)
    far = step_s(micro_batches, size, compute_s, 12.5e6, 50e-3)
    assert near < 1.2 * (micro_batches + STAGES - 1) * compute_s  # the pipeline is full but for its ends
    assert far / near < 1.5
    print(f"{width} numbers, {tflops} TFLOP/s: {near:.2f} s, {far:.2f} s, {far / near:.2f}x")
