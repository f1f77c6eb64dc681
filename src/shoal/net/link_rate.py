"""What a link has carried lately: bytes over the time in which there was something to carry."""

from __future__ import annotations

from collections import deque

from shoal.net.pipe import Counts

LEAST_BYTES = 128 << 10  # less says nothing about a rate
MEMORY_S = 20.0  # of busy time


class Rate:
    """Bytes a second while busy. An idle link keeps what was measured last."""

    def __init__(self) -> None:
        self._busy = 0  # transfers under way
        self._since = 0.0
        self._bytes = 0
        self._samples: deque[tuple[int, float]] = deque()

    def begin(self, now: float) -> None:
        if not self._busy:
            self._since, self._bytes = now, 0
        self._busy += 1

    def add(self, count: int) -> None:
        self._bytes += count

    def end(self, now: float) -> None:
        self._busy -= 1
        if not self._busy:
            self._sample(now)

    def tick(self, now: float) -> None:
        if self._busy and now - self._since >= 1:
            self._sample(now)
            self._since, self._bytes = now, 0

    @property
    def bytes_per_s(self) -> float | None:
        seconds = sum(s for _, s in self._samples)
        return sum(b for b, _ in self._samples) / seconds if seconds > 0 else None

    def _sample(self, now: float) -> None:
        if self._bytes < LEAST_BYTES and not (self._busy and self._bytes):
            return
        self._samples.append((self._bytes, max(1e-4, now - self._since)))
        while len(self._samples) > 1 and sum(s for _, s in self._samples) - self._samples[0][1] > MEMORY_S:
            self._samples.popleft()


class Loss:
    """The share of packets that had to be sent again, of the last few thousand."""

    def __init__(self) -> None:
        self._last = Counts()
        self._sent = self._lost = 0.0

    def tick(self, now: Counts) -> None:
        sent, lost = now.sent - self._last.sent, now.lost - self._last.lost
        self._last = now
        if sent < 0 or lost < 0:  # a connection was closed, and its packets went with it
            return
        if self._sent > 4000:
            self._sent, self._lost = self._sent * 0.9, self._lost * 0.9
        self._sent, self._lost = self._sent + sent, self._lost + lost

    @property
    def share(self) -> float | None:
        return min(1.0, self._lost / self._sent) if self._sent >= 20 else None
