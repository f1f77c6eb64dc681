"""Parts that peers have announced for the rounds that are open, and the files that they name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from shoal.errors import ShoalError
from shoal.net.api import PeerId
from shoal.swarm.blobs import Blobs
from shoal.swarm.round_record import Part, Record
from shoal.swarm.topology import Choice

AHEAD = 4  # rounds for which announcements are kept


class Parts:
    def __init__(
        self,
        blobs: Blobs,
        sources: Callable[[PeerId], list[PeerId]],
        event: Callable[..., None],
        choice: Callable[[PeerId], Choice | None] = lambda owner: None,
    ) -> None:
        """`sources`: who may have a peer's part. `choice`: who of them is asked first, and how long; None: all."""
        self._blobs, self._sources, self._event, self._choice = blobs, sources, event, choice
        self._said: dict[int, dict[PeerId, Part]] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self.came: dict[int, dict[PeerId, float]] = {}  # round → peer → when its file was here

    def announced(self, part: Part, head: int, now: float) -> bool:
        """Whether it is news. The first word of a peer on a round counts. `head`: the newest round that counts."""
        if not head < part.round <= head + AHEAD:
            return False
        said = self._said.setdefault(part.round, {})
        if part.peer in said:
            return False
        said[part.peer] = part
        return True

    def of(self, number: int) -> dict[PeerId, Part]:
        return self._said.get(number, {})

    def here(self, number: int) -> list[Part]:
        """Those of a round whose files are here."""
        return [part for part in self.of(number).values() if self._blobs.path(part.blob) is not None]

    def missing(self, parts: Iterable[Part]) -> list[Part]:
        return [part for part in parts if self._blobs.path(part.blob) is None]

    def fetch(self, parts: Iterable[Part], also: Iterable[PeerId] = (), urgent: bool = False) -> bool:
        """Whether all are here; what is not is being fetched from now on."""
        missing = self.missing(parts)
        for part in missing:
            sources = list(dict.fromkeys([*self._sources(part.peer), part.peer, *also]))
            choice = self._choice(part.peer)
            if part.blob not in self._fetches:
                self._fetches[part.blob] = asyncio.create_task(self._fetch(part, choice, sources, urgent))
            elif choice is None:  # else they are asked when it is time
                self._blobs.more(part.blob, sources)
        return not missing

    async def _fetch(self, part: Part, choice: Choice | None, sources: list[PeerId], urgent: bool) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        first, wait_s = (sources, 0.0) if choice is None else (list(choice.first), choice.wait_s)
        late = loop.call_later(wait_s, self._blobs.more, part.blob, sources)
        try:
            await self._blobs.fetch(part.blob, part.size, first, urgent=urgent)
            now = loop.time()
            self.came.setdefault(part.round, {})[part.peer] = now
            self._event("part", peer=part.peer, round=part.round, bytes=part.size, seconds=round(now - began, 3))
        except (OSError, ValueError, ShoalError) as e:
            self._event("part-missing", peer=part.peer, round=part.round, why=str(e)[:200])
            await asyncio.sleep(1.0)  # whoever needs it asks again
        finally:
            late.cancel()
            self._fetches.pop(part.blob, None)

    def settle(self, record: Record) -> None:
        """Rounds up to this one are decided."""
        for number in [n for n in self._said if n <= record.round]:
            del self._said[number]
        for number in [n for n in self.came if n < record.round - 2]:
            del self.came[number]

    async def close(self) -> None:
        tasks = list(self._fetches.values())
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
