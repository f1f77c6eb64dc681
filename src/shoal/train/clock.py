"""Laps of one step, for its journal record."""

from __future__ import annotations

import time


class Clock:
    """Laps of one step; `begin` is wall time, for the ledger."""

    def __init__(self) -> None:
        self.begin, self._last = round(time.time(), 6), time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(self.laps.get(name, 0.0) + now - self._last, 6)
        self._last = now
