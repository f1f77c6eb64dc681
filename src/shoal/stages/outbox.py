"""Messages on their way to neighbours: in order, some at a time, tried again until they arrive or are of no use.

One after the other would waste a long link (each waits for its answer), all at once would let the last arrive with the
first. So up to `WINDOW` bytes are under way to a peer, enough for 100 Mbit/s and 100 ms, and always two messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shoal.net.api import Endpoint, Message, PeerId, Refused, Unreachable

WINDOW = 2 << 20
PAUSE_S = 0.2  # before a message that did not arrive is tried again
ANSWER_S = 60.0  # a large one may queue for long on a slow link; a peer that is gone is known sooner


class Outbox:
    """For one peer."""

    def __init__(self, endpoint: Endpoint, peer: PeerId) -> None:
        self._endpoint, self._peer = endpoint, peer
        self._waiting: deque[tuple[Message, Callable[[], bool]]] = deque()
        self._under_way = 0
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.broken: Exception | None = None  # what could not be sent at all

    def put(self, message: Message, wanted: Callable[[], bool]) -> None:
        """`wanted` says whether it still is of use."""
        self._waiting.append((message, wanted))
        self._start()

    def close(self) -> None:
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    def _start(self) -> None:
        while self._waiting and (self._count < 2 or self._under_way + len(self._waiting[0][0].body) <= WINDOW):
            message, wanted = self._waiting.popleft()
            if not wanted():
                continue
            self._count += 1
            self._under_way += len(message.body)
            task = asyncio.create_task(self._send(message, wanted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, message: Message, wanted: Callable[[], bool]) -> None:
        try:
            while wanted():
                try:
                    await self._endpoint.ask(self._peer, message, timeout_s=ANSWER_S)
                    return
                except (Unreachable, Refused):
                    await asyncio.sleep(PAUSE_S)
        except ValueError as e:  # it cannot be sent: nobody would wait for it otherwise
            self.broken = self.broken or e
        finally:
            self._count -= 1
            self._under_way -= len(message.body)
            self._start()
