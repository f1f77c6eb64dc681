"""Blobs among peers: what this one has it serves, what it lacks it fetches from whoever has pieces of it.

Parts of rounds, snapshots for newcomers, data sets and tokenizers all travel this way. What a round waits for is
`urgent`: while such pieces are being served, others wait a little, so that a newcomer's download does not hold up a
round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import DataError
from shoal.net.answers import Answers
from shoal.net.api import Endpoint, Event, Message, PeerId
from shoal.swarm.blob_fetch import KIND, MOST_BODY, Fetch, NotFound, WrongSize
from shoal.swarm.blob_folder import MOST_MANIFEST, File, add_folder, parse, within
from shoal.swarm.blob_store import MOST_PIECES, Store, is_name

__all__ = ["Blobs", "NotFound", "WrongSize"]

IN_FLIGHT = 64  # pieces of 1 MiB asked for at a time, over all fetches
SERVED = 32  # pieces in memory for others at a time
SERVED_EACH = 16  # questions of one peer at a time
PATIENCE_S = 60.0
GIVE_WAY_S = 2.0  # at most so long does a piece wait for urgent ones
FILES_AT_ONCE = 4


@dataclass
class _Running:
    fetch: Fetch
    task: asyncio.Task[Path]
    waiting: int = 0


@dataclass
class Served:
    """What was sent to others, for the status view."""

    pieces: int = 0
    bytes: int = 0
    by_peer: Counter[PeerId] = field(default_factory=Counter)


class Blobs:
    """Belongs to the endpoint's loop; `store` may be used from any thread."""

    def __init__(
        self, folder: Path, endpoint: Endpoint, event: Event | None = None, answers: Answers | None = None
    ) -> None:
        self.store = Store(folder)
        self.served = Served()
        self.liars: Counter[PeerId] = Counter()  # who sent what was not the blob, and how often
        self._endpoint = endpoint
        self._event: Event = event or (lambda kind, **fields: None)
        self._answers = answers or Answers(endpoint, self._event)
        self._running: dict[str, _Running] = {}
        self._adding = 0
        self._in_flight, self._reads = asyncio.Semaphore(IN_FLIGHT), asyncio.Semaphore(SERVED)
        self._asking: Counter[PeerId] = Counter()
        self._urgent_until = 0.0
        endpoint.on(KIND, self._serve, most_body=0)

    def path(self, name: str) -> Path | None:
        """Where the whole blob is, if it is here."""
        return self.store.path(name)

    def add_file(self, file: Path, outside: bool = False) -> tuple[str, int]:
        """Reads the whole file; `add` does so without holding up the loop."""
        return self.store.add_file(file, outside)

    def add_folder(self, folder: Path, outside: bool = False) -> tuple[str, int]:
        return add_folder(self.store, folder, outside)

    async def add(self, there: Path, outside: bool = False) -> tuple[str, int]:
        """The name and length of a file, or of a folder's manifest. Until the caller waits for something else nothing
        is deleted: it has to say by then that it is kept."""
        self._adding += 1
        try:
            return await asyncio.to_thread(self.add_folder if there.is_dir() else self.add_file, there, outside)
        finally:
            self._adding -= 1

    async def fetch(
        self, name: str, size: int, sources: Sequence[PeerId], *, urgent: bool = False, patience_s: float = PATIENCE_S
    ) -> Path:
        """The whole blob, here. Sources may have all of it, some, or none yet; more of them make it quicker. Raises
        `NotFound` when nothing has come for `patience_s`; what has come is kept for the next attempt."""
        if not is_name(name):
            raise ValueError(f"'{name}' is no name of a blob")
        if (there := self.store.path(name)) is not None:
            return there
        running = self._running.get(name)
        if running is None:
            fetch = Fetch(
                self.store,
                self._endpoint.id,
                self._answers,
                name,
                size,
                room=self._in_flight,
                event=self._event,
                lied=self._lied,
                urgent=urgent,
                patience_s=patience_s,
            )
            running = _Running(fetch, asyncio.create_task(self._run(fetch)))
            self._running[name] = running
        honest = [peer for peer in sources if not self.liars[peer]]
        running.fetch.add(honest or sources)
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if running.waiting == 0 and not running.task.done():  # nobody wants it any more
                running.task.cancel()

    def more(self, name: str, sources: Iterable[PeerId]) -> None:
        """Others that have it, for a fetch under way."""
        if (running := self._running.get(name)) is not None:
            running.fetch.add(sources)

    async def fetch_folder(
        self,
        name: str,
        size: int,
        sources: Sequence[PeerId],
        into: Path,
        *,
        patience_s: float = PATIENCE_S,
        most_bytes: int,
    ) -> Path:
        """All files of a folder, as links into the store; `into` appears when it is complete. `most_bytes` is what was
        said of it before, or what such a folder has at most: a manifest may not name more."""
        if size > MOST_MANIFEST:
            raise DataError(f"a folder's manifest of {size} bytes is longer than any should be.")
        text = (await self.fetch(name, size, sources, patience_s=patience_s)).read_bytes()
        files = parse(text)
        if (total := sum(f.size for f in files)) > most_bytes:
            raise DataError(f"{into.name} has {total} bytes, where it should have {most_bytes} at most; not fetched.")
        self.store.mark_folder(name)
        room = asyncio.Semaphore(FILES_AT_ONCE)

        async def one(file: File) -> None:
            async with room:
                await self.fetch(file.blob, file.size, sources, patience_s=patience_s)

        async with asyncio.TaskGroup() as group:
            for file in files:
                group.create_task(one(file))
        await asyncio.to_thread(self._lay_out, files, into)
        return into

    def retain(self, keep: Iterable[str]) -> int:
        """Deletes all others but what is being fetched, and says how many bytes that freed. The files of a folder that
        is kept are kept. Nothing goes while one is added, whose name nobody knows yet; it goes the next time."""
        if self._adding:
            return 0
        wanted = set(keep)
        for name in list(wanted):
            if self.store.is_folder(name):
                with contextlib.suppress(DataError):
                    wanted |= {file.blob for file in within(self.store, name)}
        return sum(self.store.delete(name) for name in self.store.names() - wanted - self._running.keys())

    async def close(self) -> None:
        """Ends what is being fetched; its pieces stay."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, fetch: Fetch) -> Path:
        try:
            return await fetch.run()
        finally:
            self._running.pop(fetch.name, None)

    def _lied(self, peer: PeerId, why: str) -> None:
        self.liars[peer] += 1

    def _lay_out(self, files: list[File], into: Path) -> None:
        part = into.with_name(f".{into.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for file in files:
            to, source = part / file.path, self.store.path(file.blob)
            if source is None:
                raise DataError(f"{file.path} of a fetched folder is gone from {self.store.folder}; fetch it again.")
            to.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, to)
            except OSError:
                shutil.copyfile(source, to)
        if into.exists():
            shutil.rmtree(into)
        part.rename(into)

    async def _serve(self, peer: PeerId, message: Message) -> Message | None:
        fields = message.fields
        name, piece, urgent = fields.get("name"), fields.get("piece"), fields.get("urgent") is True
        if not isinstance(name, str) or not is_name(name) or self._asking[peer] >= SERVED_EACH:
            return Message(KIND, {"have": "0", "missing": True})
        self._asking[peer] += 1
        try:
            if type(piece) is int and 0 <= piece < MOST_PIECES:
                return await self._piece(peer, name, piece, urgent)
            have = self._have(name)
            wants_list = fields.get("list") is True and have != "0"
            hashes = await asyncio.to_thread(self.store.hashes, name) if wants_list else b""
            return Message(KIND, {"have": have, "size": self.store.size(name)}, hashes or b"")
        finally:
            self._asking[peer] -= 1
            if not self._asking[peer]:
                del self._asking[peer]

    async def _piece(self, peer: PeerId, name: str, piece: int, urgent: bool) -> Message:
        have = self._have(name)
        if have != "all" and not int(have, 16) >> piece & 1:
            return Message(KIND, {"have": have, "missing": True})
        await self._give_way(urgent)
        async with self._reads:
            data = await asyncio.to_thread(self.store.read_piece, name, piece)
        if not data or len(data) > MOST_BODY:
            return Message(KIND, {"have": self._have(name), "missing": True})
        self.served.pieces += 1
        self.served.bytes += len(data)
        self.served.by_peer[peer] += len(data)
        return Message(KIND, {} if have == "all" else {"have": have}, data)

    async def _give_way(self, urgent: bool) -> None:
        now = time.monotonic()
        if urgent:
            self._urgent_until = now + 0.3
            return
        until = now + GIVE_WAY_S
        while (now := time.monotonic()) < min(until, self._urgent_until):
            await asyncio.sleep(min(until, self._urgent_until) - now)

    def _have(self, name: str) -> str:
        """ "all", or the pieces as bits in hexadecimal digits."""
        if self.store.path(name) is not None:
            return "all"
        running = self._running.get(name)
        return f"{running.fetch.have or 0:x}" if running is not None else "0"
