"""A member that answers nonsense to everything, and links in memory that carry it.

`Bus` joins endpoints of one process: messages take a moment, their heads go through the real frames, and whatever a
handler raises that is no refusal is kept (`broken`). `Nonsense` stands between a real node and its endpoint: what the
node answers (and, if asked to, what it says unasked) is replaced by something seeded that no honest peer sends.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

from shoal.net import frames
from shoal.net.api import Address, Handler, LinkState, Message, PeerId, Refused, Unreachable

LATENCY_S = 0.01
HUGE = 10**400
ODD: tuple[Any, ...] = (
    None, True, 5, -1, 0, 1 << 62, 1 << 63, 1.5, -1e308, 1e15, "", "\x00", "x" * 3000, "ab" * 32, "all",
    [], {}, [[]], {"a": {}}, [None] * 50, [5], [{}], "NaN",
)  # fmt: skip
RAW: tuple[bytes, ...] = (
    b"", b"5", b"null", b"[]", b"{}", b"[5]", b"[{}]", b"NaN", b"[NaN]", b'{"head": Infinity}', b"1e999", b"\xff\xfe",
    b"[" * 50_000, b'{"a":' * 30_000, b'{"head": ' + str(HUGE).encode() + b"}", b'{"records": 5, "head": 1}', b"\0" * 9,
)  # fmt: skip


class Bus:
    def __init__(self) -> None:
        self.ends: dict[PeerId, End] = {}
        self.asked: list[tuple[PeerId, PeerId, str]] = []  # who, whom, what
        self.broken: list[BaseException] = []

    async def carry(self, by: PeerId, to: PeerId, message: Message) -> Message:
        await asyncio.sleep(LATENCY_S)
        if to not in self.ends or by not in self.ends:
            raise Unreachable("nobody is there")
        handler, most = self.ends[to].handlers.get(message.kind, (None, 0))
        if handler is None or len(message.body) > most:
            raise Refused("nobody answers that here, or not so much of it")
        try:
            return await handler(by, _framed(message)) or Message("ok")
        except (Refused, Unreachable):
            raise
        except Exception as e:
            self.broken.append(e)
            raise Refused("failed there") from e


class End:
    """Implements `net.api.Endpoint`."""

    def __init__(self, bus: Bus, me: PeerId) -> None:
        self.id, self.bus, self.handlers = me, bus, dict[str, tuple[Handler, int]]()
        self._tells = set[asyncio.Task[None]]()

    async def start(self) -> None:
        self.bus.ends[self.id] = self

    async def close(self) -> None:
        self.bus.ends.pop(self.id, None)
        for task in self._tells:
            task.cancel()

    def address(self) -> Address:
        return Address()

    def on(self, kind: str, handler: Handler, most_body: int = 1 << 20) -> None:
        self.handlers[kind] = handler, most_body

    def know(self, peer: PeerId, address: Address) -> None: ...

    def forget(self, peer: PeerId) -> None: ...

    async def ask(self, peer: PeerId, message: Message, timeout_s: float = 10.0, most_body: int = 1 << 20) -> Message:
        self.bus.asked.append((self.id, peer, message.kind))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.bus.carry(self.id, peer, message)
                await asyncio.sleep(LATENCY_S)
        except TimeoutError as e:
            raise Unreachable("no answer in time") from e
        if len(answer.body) > most_body:
            raise Refused("more than was asked for")
        return _framed(answer)

    def tell(self, peer: PeerId, message: Message) -> None:
        async def told() -> None:
            try:
                await self.bus.carry(self.id, peer, message)
            except (Refused, Unreachable):
                return

        task = asyncio.ensure_future(told())
        self._tells.add(task)
        task.add_done_callback(self._tells.discard)

    def links(self) -> dict[PeerId, LinkState]:
        others = sorted(self.bus.ends.keys() - {self.id})
        return {p: LinkState(p, "tcp", 2 * LATENCY_S, 0.0, 1e8, 1e8, heard_s=0.0) for p in others}


def _framed(message: Message) -> Message:
    """As it arrives. What is no frame would end the connection."""
    try:
        head = frames.parse(b"".join(frames.head("answer", 1, Message(message.kind, message.fields))))
    except ValueError as e:
        raise Unreachable(f"the link broke: {e}") from e
    assert isinstance(head, frames.Head)
    return Message(head.kind, head.fields, message.body)


class Made:
    """Nonsense, by a seed. `drip_s`: some answers take so long."""

    def __init__(self, seed: int, drip_s: float = 0.0) -> None:
        self.rng, self._drip_s = random.Random(seed), drip_s

    async def answer(self, true: Message) -> Message:
        if self._drip_s and self.rng.random() < 0.1:
            await asyncio.sleep(self._drip_s)
        return self.of(true)

    def of(self, true: Message) -> Message:
        """Something else in the place of a message, often almost right."""
        rng, body = self.rng, bytes(true.body)
        fields: dict[str, Any] = dict(true.fields)
        for key in fields:
            if rng.random() < 0.7:
                fields[key] = rng.choice(ODD)
        how = rng.randrange(6)
        if how == 0:
            body = body[: rng.randrange(len(body) + 1)]
        elif how == 1 and body:
            at = rng.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 1 << rng.randrange(8)]) + body[at + 1 :]
        elif how == 2:
            body = self._twisted(body)
        elif how == 3:
            body = rng.randbytes(rng.choice([1, 8, 100, 5000]))
        else:
            body = rng.choice(RAW)
        if body == bytes(true.body):
            body, fields = rng.choice(RAW[1:]), {}
        return Message(rng.choice([true.kind, true.kind, "ok", "later", "x"]), fields, body)

    def _twisted(self, body: bytes) -> bytes:
        """JSON with one value replaced, however deep."""
        try:
            said = json.loads(body)
        except ValueError:
            return b"null"
        at = said
        while isinstance(at, dict | list) and at:
            key = self.rng.choice(sorted(at)) if isinstance(at, dict) else self.rng.randrange(len(at))
            if not isinstance(at[key], dict | list) or not at[key] or self.rng.random() < 0.4:
                at[key] = self.rng.choice(ODD)
                return json.dumps(said).encode()
            at = at[key]
        return b"7"


class Nonsense:
    """An endpoint whose answers make no sense; `says` makes what it says unasked of a true message, too."""

    def __init__(self, inner: Any, made: Made, says: Callable[[Message], Message] | None = None) -> None:
        self._inner, self.id, self.made, self._says = inner, inner.id, made, says

    def on(self, kind: str, handler: Handler, most_body: int = 1 << 20) -> None:
        async def answer(peer: PeerId, message: Message) -> Message:
            try:
                true = await handler(peer, message)
            except Refused:
                true = None
            return await self.made.answer(true or Message("ok", {"have": "all", "same": True, "at": "1.2.3.4:5"}))

        self._inner.on(kind, answer, most_body)

    def tell(self, peer: PeerId, message: Message) -> None:
        self._inner.tell(peer, message if self._says is None else self._says(message))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
