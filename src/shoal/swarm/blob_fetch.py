"""One blob from many peers at once: who is quick brings more, who is slow, gone or lying costs little.

Each source has a few *lanes*, each with one question under way; a source gets more lanes as long as its pieces come
quickly. A lane takes a random piece that is still missing, so peers that fetch the same blob hold different pieces and
trade them. When nothing is left to begin, pieces that are late are asked for a second time elsewhere: the last pieces
never wait for the slowest. A piece that is not what the list says is thrown away, its sender told of and asked no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import DataError, TransientError
from shoal.net.answers import Answers
from shoal.net.api import Event, Message, PeerId, Refused, Unreachable
from shoal.swarm.blob_store import MOST_PIECES, PIECE, Store, is_whole, pieces_in
from shoal.values import BadValue, flag, text, whole

KIND = "blob"
MOST_BODY = PIECE
MOST_LANES = 6
# A piece that comes sooner opens another lane, one that comes later closes one: questions that wait at a slow uplink
# bring nothing, and what is asked for there is not asked for at a peer that has it meanwhile.
QUICK_S, SLOW_S = 0.5, 1.0
PIECE_S = 60.0  # for one answer; long enough at 150 kbit/s
LATE_S = 1.0  # with nothing else to do, a piece is asked for once more for each such time it has not come
POLL_S = (0.05, 0.5)  # between two questions to a source that has nothing for us
AGAIN_S = (0.25, 8.0)  # after a failure
_ALL = (1 << MOST_PIECES) - 1
_DIGITS = re.compile(r"[0-9a-f]+\Z")


class NotFound(TransientError):
    """No source had it, or none that told the truth, for as long as one was patient."""


class WrongSize(DataError):
    """The blob is there, and is not as long as was said: the fault of whoever announced it, not of the sources."""


@dataclass(frozen=True)
class Shown:
    """What a source says of a blob: its pieces, as bits, and its length, as far as it says them; with a list of hashes,
    or a piece, or nothing."""

    have: int | None
    size: int | None
    missing: bool  # it has not the piece that it was asked for
    body: bytes | memoryview


@dataclass
class Source:
    peer: PeerId
    have: int | None = None  # its pieces, as bits; None: not asked yet
    lanes: int = 0
    wanted: int = 1  # lanes it has earned
    failures: int = 0
    lied: bool = False
    brought: int = 0  # bytes
    asked: dict[int, float] = field(default_factory=dict)  # pieces under way, since when


class Fetch:
    def __init__(
        self,
        store: Store,
        me: PeerId,
        answers: Answers,
        name: str,
        size: int,
        *,
        room: asyncio.Semaphore,
        event: Event,
        lied: Callable[[PeerId, str], None],
        urgent: bool,
        patience_s: float,
    ) -> None:
        if not 0 <= size <= MOST_PIECES * PIECE:
            raise ValueError(f"a blob of {size} bytes cannot be")
        self._store, self._me, self._answers, self._room = store, me, answers, room
        self._event, self._lied, self._urgent, self._patience_s = event, lied, urgent, patience_s
        self.name, self.size = name, size
        self._all = (1 << pieces_in(size)) - 1
        self.have: int | None = None  # pieces that are here, as bits; None: the list has not come yet
        self._under_way: Counter[int] = Counter()
        self._sources: dict[PeerId, Source] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._last = time.monotonic()  # when something came
        self._broken: BaseException | None = None
        self._beginning = asyncio.Lock()

    def add(self, sources: Iterable[PeerId]) -> None:
        """More of them, also while it is under way."""
        for peer in sources:
            if peer != self._me and peer not in self._sources:
                # Two to begin with: a line that has just been opened is slow, which says nothing about it.
                self._sources[peer] = Source(peer, wanted=min(2, MOST_LANES))
                self._start(self._lane(self._sources[peer]))

    async def run(self) -> Path:
        began = time.monotonic()
        try:
            if (hashes := await asyncio.to_thread(self._store.hashes, self.name)) is not None or self.size == 0:
                with contextlib.suppress(ValueError):  # an earlier attempt got that far
                    await self._begin(hashes or b"")
            while self.have != self._all:
                if self._broken is not None:
                    raise self._broken
                if all(source.lied for source in self._sources.values()):
                    raise NotFound(f"nobody has offered the true blob {self.name[:12]}; ask other peers.")
                if time.monotonic() - self._last > self._patience_s:
                    raise NotFound(
                        f"blob {self.name[:12]} of {self.size} bytes: nothing has come for {self._patience_s:g} s from "
                        f"{len(self._sources)} peers; see whether they are connected."
                    )
                await self._wait(0.5)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        path = await asyncio.to_thread(self._store.finish, self.name)
        brought = {s.peer: s.brought for s in self._sources.values() if s.brought}
        self._event("blob", name=self.name, bytes=self.size, seconds=time.monotonic() - began, brought=brought)
        return path

    def _start(self, lane: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(lane)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (wrong := task.exception()) is not None:
            self._broken = wrong  # such as a full disk: no other source would help
        self._moved.set()

    async def _lane(self, source: Source) -> None:
        source.lanes += 1
        pause = POLL_S[0]
        try:
            while self.have != self._all and not source.lied and source.lanes <= source.wanted:
                try:
                    if self.have is None or source.have is None:
                        await self._look(source)
                        progress = source.have not in (None, 0)
                        if progress and source.lanes < source.wanted:
                            self._start(self._lane(source))
                    else:
                        progress = await self._one(source)
                except (Unreachable, Refused, TimeoutError):
                    source.failures += 1
                    source.have, source.wanted = None, 1
                    await asyncio.sleep(min(AGAIN_S[0] * 2 ** min(source.failures, 8), AGAIN_S[1]))
                    continue
                if progress:
                    pause = POLL_S[0]
                    continue
                if source.have == self._all:
                    await self._wait(0.2)  # something to do comes only from other sources' failures
                    continue
                if source.lanes > 1:
                    source.wanted = 1
                    continue
                await asyncio.sleep(pause)
                pause = min(2 * pause, POLL_S[1])
                source.have = None  # it may have more by now
        finally:
            source.lanes -= 1

    async def _look(self, source: Source) -> None:
        """What a source has; and the list, from the first one that is right."""
        wants = self.have is None
        said = await self._ask(source, {"list": wants})
        source.failures = 0
        source.have = (said.have or 0) & self._all
        if wants and source.have:
            hashes = bytes(said.body)
            try:
                await self._begin(hashes)
            except ValueError as e:
                if said.size not in (None, self.size) and is_whole(self.name, said.size, hashes):
                    raise WrongSize(
                        f"blob {self.name[:12]} has {said.size} bytes, not {self.size}; who announced it is wrong."
                    ) from None
                self._blame(source, str(e))

    async def _begin(self, hashes: bytes) -> None:
        async with self._beginning:
            if self.have is None:
                self.have = await asyncio.to_thread(self._store.begin, self.name, self.size, hashes)
                self._touch()

    async def _one(self, source: Source) -> bool:
        """One piece; False where the source has none that we need now."""
        piece = self._choose(source)
        if piece is None:
            return False
        self._under_way[piece] += 1
        source.asked[piece] = began = time.monotonic()
        try:
            async with self._room:
                said = await self._ask(source, {"piece": piece})
                took = time.monotonic() - began
                if said.have is not None:
                    source.have = said.have & self._all
                if said.missing:
                    source.have = (source.have or 0) & ~(1 << piece)
                    return False
                good = await asyncio.to_thread(self._store.write_piece, self.name, piece, said.body)
        finally:
            self._under_way[piece] -= 1
            source.asked.pop(piece, None)
            self._moved.set()
        if not good:
            self._blame(source, f"piece {piece} is not what it should be")
            return True
        source.failures, source.brought = 0, source.brought + len(said.body)
        self.have = (self.have or 0) | 1 << piece
        self._touch()
        self._grow(source, took)
        return True

    def _grow(self, source: Source, took: float) -> None:
        alone = sum(1 for other in self._sources.values() if other.have) == 1
        if took <= QUICK_S and source.wanted < MOST_LANES:
            source.wanted += 1
        elif took > SLOW_S and source.wanted > 1:
            source.wanted -= 1
        if alone:
            source.wanted = max(source.wanted, 2)  # its line is not idle between two pieces
        if source.lanes < source.wanted:
            self._start(self._lane(source))

    def _choose(self, source: Source) -> int | None:
        missing = self._all & ~(self.have or 0) & (source.have or 0)
        for other in self._sources.values():
            for piece in other.asked:
                missing &= ~(1 << piece)
        if missing:
            return _random_bit(missing)
        # Nothing left to begin: what is late elsewhere, the latest first.
        now = time.monotonic()
        useful = self._all & ~(self.have or 0) & (source.have or 0)
        late = [
            (since, piece)
            for other in self._sources.values()
            for piece, since in other.asked.items()
            if useful >> piece & 1 and piece not in source.asked and self._under_way[piece] < 1 + (now - since) / LATE_S
        ]
        return min(late)[1] if late else None

    async def _ask(self, source: Source, fields: dict[str, object]) -> Shown:
        fields = {"name": self.name, "urgent": self._urgent, **fields}
        return await self._answers.ask(source.peer, Message(KIND, fields), read_shown, PIECE_S, MOST_BODY)

    def _blame(self, source: Source, why: str) -> None:
        if source.lied:  # another lane has found out
            return
        source.lied = True
        self._lied(source.peer, why)
        self._event("refused", what="a blob", why=why, peer=source.peer, blob=self.name)

    def _touch(self) -> None:
        self._last = time.monotonic()
        self._moved.set()

    async def _wait(self, timeout_s: float) -> None:
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._moved.wait()


def read_shown(answer: Message) -> Shown:
    """Of a source, whatever it was asked. BadValue for what is none."""
    have, size, missing = (answer.fields.get(key) for key in ("have", "size", "missing"))
    return Shown(
        None if have is None else _bits(have),
        None if size is None else whole(size, MOST_PIECES * PIECE),
        missing is not None and flag(missing),
        answer.body,
    )


def _bits(said: object) -> int:
    """ "all", or hexadecimal digits."""
    if said == "all":
        return _ALL
    if not _DIGITS.match(text(said, MOST_PIECES // 4)):
        raise BadValue("no hexadecimal digits where pieces are named")
    return int(str(said), 16)


def _random_bit(bits: int) -> int:
    shift = random.randrange(bits.bit_length())
    above = bits >> shift
    return (above & -above).bit_length() - 1 + shift
