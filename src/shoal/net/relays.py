"""The relays of one endpoint: which are up, which one is its home, and which one reaches a peer.

A peer that is relayed can be reached through its *home* only, the one relay that iroh keeps a connection to. iroh looks
for another 45 s after it was lost (1.2.0, measured 2026-11-16); told that the relay is no more, it does at once. So
each relay is watched through a connection of its own, which ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import iroh

from shoal import wire
from shoal.net.api import Event, PeerId
from shoal.net.relay_client import WATCH_S
from shoal.net.relay_url import MOST_RELAYS
from shoal.net.rendezvous import call, where
from shoal.net.tasks import FOR_EVER, Tasks, words
from shoal.values import name, read_object, table, text

CALL_S = 10.0
AGAIN_S = 2.0  # between two attempts to reach one
HOME_S = 3.0  # for iroh to choose another home
SETTLE_S = 0.3  # for it to connect there
WHERE_S = 15.0  # between two questions to a rendezvous: a NAT forgets a mapping after 30 s at the earliest
MOST_LINE = 64 << 10

Learn = Callable[[str, str], Awaitable[None]]  # this endpoint's ip:port, as who sees it


class Relays:
    def __init__(
        self,
        urls: tuple[str, ...],
        config: Callable[[str], iroh.RelayConfig],
        learn: Learn,
        lost: Callable[[str], None],
        event: Event,
    ) -> None:
        self._urls, self._up = list(dict.fromkeys(map(plain, urls)))[:MOST_RELAYS], set[str]()
        self._config, self._learn, self._lost, self._event = config, learn, lost, event
        self._endpoint: iroh.Endpoint | None = None
        self._tasks = Tasks(event, lambda name, e: event("task-failed", task=name, text=words(e)))

    def map(self) -> iroh.RelayMap:
        found = iroh.RelayMap.empty()
        for url in self._urls:
            found.insert(self._config(url))
        return found

    def start(self, endpoint: iroh.Endpoint) -> None:
        self._endpoint = endpoint
        for url in self._urls:
            self._keep_watch(url)

    async def close(self) -> None:
        await self._tasks.close()
        self._endpoint = None  # iroh's sockets are closed when nobody refers to it

    def urls(self) -> tuple[str, ...]:
        """Home first, then those that are up."""
        home = self._endpoint.addr().relay_url() if self._endpoint is not None else None
        rank = {url: (url != plain(home or ""), url not in self._up, i) for i, url in enumerate(self._urls)}
        return tuple(sorted(self._urls, key=lambda url: rank[url]))

    def use(self, urls: tuple[str, ...]) -> None:
        """Others' relays too, so that the loss of one is survived."""
        for url in map(plain, urls):
            if url not in self._urls and len(self._urls) < MOST_RELAYS:
                self._urls.append(url)
                self._tasks.spawn(self._add(url))

    def towards(self, theirs: tuple[str, ...], attempt: int) -> str | None:
        """Of a peer's relays, home first, those that are up; what it said may be old, so each in its turn."""
        known = [plain(url) for url in theirs]
        good = [url for url in known if url in self._up] or known
        return good[attempt % len(good)] if good else None

    async def _add(self, url: str) -> None:
        assert self._endpoint is not None
        try:
            await self._endpoint.insert_relay(self._config(url))
        except iroh.IrohError as e:
            self._urls.remove(url)
            self._event("relay_refused", at=url, reason=_said(e))
            return
        self._keep_watch(url)

    def _keep_watch(self, url: str) -> None:
        self._tasks.keep(f"the watch over {url}", lambda: self._watch(url), borne=FOR_EVER)

    async def _watch(self, url: str) -> None:
        """For ever. Only one that was up is taken from iroh: others may be relays that are not ours."""
        assert self._endpoint is not None
        told = removed = False
        while True:
            why = "it has closed the connection"
            try:
                async with _opened(url) as (reader, (peer, at)):
                    if removed:
                        await self._endpoint.insert_relay(self._config(url))
                    removed = told = False
                    self._up.add(url)
                    self._event("relay_up", at=url)
                    asker = asyncio.ensure_future(self._ask(url, peer, at))
                    try:
                        line = b"first"
                        while line:
                            async with asyncio.timeout(3 * WATCH_S):
                                line = await reader.readline()
                    finally:
                        asker.cancel()
            except (OSError, ValueError, TimeoutError, iroh.IrohError) as e:
                why = _said(e)
            if url in self._up:
                self._up.remove(url)
                removed = True
                with contextlib.suppress(iroh.IrohError):
                    await self._endpoint.remove_relay(url)
                self._tasks.spawn(self._leave(url))
            if not told:
                told = True
                self._event("relay_down", at=url, reason=why)
            await asyncio.sleep(AGAIN_S * random.uniform(0.5, 1.5))

    async def _leave(self, url: str) -> None:
        """What went through it is dialed again once there is another home: QUIC repeats a first packet that was too
        early after 1, 3 and 7 s only."""
        begun = time.monotonic()
        while self._up and time.monotonic() - begun < HOME_S:
            home = self._endpoint.addr().relay_url() if self._endpoint is not None else None
            if home is not None and plain(home) != url:
                await asyncio.sleep(SETTLE_S)
                break
            await asyncio.sleep(0.05)
        self._lost(url)

    async def _ask(self, url: str, peer: str, at: str) -> None:
        """For ever: the address may change, and asking keeps the NAT's mapping alive."""
        assert self._endpoint is not None
        told = False
        while True:
            try:
                async with asyncio.timeout(CALL_S):
                    connection = await call(self._endpoint, peer, at)
                while True:
                    async with asyncio.timeout(CALL_S):
                        seen = await where(connection)
                    await self._learn(seen, url)
                    await asyncio.sleep(WHERE_S)
            except (iroh.IrohError, ValueError, TimeoutError) as e:
                if not told:
                    told = True  # a network that lets no UDP out, say: the relay itself may work
                    self._event("rendezvous_failed", at=at, reason=_said(e))
            await asyncio.sleep(AGAIN_S)


@contextlib.asynccontextmanager
async def _opened(url: str) -> Any:
    """The relay's sign of life, and where its rendezvous is."""
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ValueError(f"{url!r} is no relay")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    async with asyncio.timeout(CALL_S):
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None, limit=MOST_LINE)
    try:
        writer.write(f"GET /watch HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode("latin-1"))
        async with asyncio.timeout(CALL_S):
            if b" 200 " not in await reader.readline():
                raise ValueError("it is no relay of a swarm")
            while (await reader.readline()).strip():
                pass
            found = read_rendezvous(await reader.readline())
        yield reader, found
    finally:
        writer.close()


def read_rendezvous(line: bytes) -> tuple[PeerId, str]:
    """Of what a relay tells of itself: who answers beside it, and where. ValueError for what is none."""
    found = table(read_object(line).get("rendezvous"), 64)
    at = text(found.get("addr"), 64)
    wire.address_of(at)
    return name(found.get("id")), at


def plain(url: str) -> str:
    """iroh ends them with a slash, people do not."""
    return url.rstrip("/")


def _said(e: Exception) -> str:
    text = str(e.message() if hasattr(e, "message") else e) or type(e).__name__
    return text.splitlines()[0][:200]
