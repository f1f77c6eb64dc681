"""Messages of a connection, received by a thread, so that whoever reads them can sleep on something else."""

from __future__ import annotations

import queue
import threading

from shoal.guard.nodes.talk import LOST, Line, Message


class Inbox:
    def __init__(self, line: Line) -> None:
        self._line = line
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.lost: str | None = None  # why nothing more will come
        threading.Thread(target=self._receiving, name="shoal-inbox", daemon=True).start()

    def take(self) -> list[Message]:
        found = []
        while not self._messages.empty():
            found.append(self._messages.get())
        return found

    def _receiving(self) -> None:
        try:
            while True:
                self._messages.put(self._line.receive())
        except LOST as e:
            self.lost = str(e) or "the connection was closed"
