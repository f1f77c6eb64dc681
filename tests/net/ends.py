"""Endpoints on loopback for tests, each with its journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from shoal.net.api import Message, PeerId
from shoal.net.endpoint import Peers, connect
from shoal.net.identity import Identity
from shoal.net.pipe import Pipe


class Journal:
    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.said.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.said if e["kind"] == kind]


async def echo(peer: PeerId, message: Message) -> Message:
    return Message("echo", {"from": peer, **message.fields}, message.body)


def end(identity: Identity | None = None, **options: Any) -> tuple[Peers, Journal]:
    journal = Journal()
    options = {"admit": lambda peer, proof: True, "host": "127.0.0.1", "quic": False, **options}
    peers = connect(identity or Identity.new(), event=journal, **options)
    peers.on("echo", echo, most_body=64 << 20)
    return peers, journal


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[Peers, Peers, Journal, Journal]]:
    """Two that know each other."""
    (a, said_a), (b, said_b) = end(**options), end(**options)
    await a.start()
    await b.start()
    try:
        a.know(b.id, b.address())
        b.know(a.id, a.address())
        yield a, b, said_a, said_b
    finally:
        await a.close()
        await b.close()


async def until(true: Callable[[], Any], within_s: float = 10.0) -> None:
    """`within_s`: on a machine with nothing else to do. It is asked whether it happens; a busy one has ten times as
    long before it counts as stuck."""
    end_s = time.monotonic() + 10 * within_s
    while not true():
        assert time.monotonic() < end_s, "it did not happen"
        await asyncio.sleep(0.01)


async def drain(pipe: Pipe) -> None:
    """Reads until the connection ends, which is an error."""
    while True:
        await pipe.receive()
