"""Laps of one step: for its journal record, and for those who watch from outside while it lasts."""

from __future__ import annotations

import time

from shoal.observe.pulse import SILENT, Pulse


class Clock:
    """Laps of one step; `begin` is wall time, for the ledger."""

    def __init__(self, pulse: Pulse = SILENT, step: int = 0) -> None:
        pulse.mark("data", step)
        self._pulse = pulse
        self.begin, self._last = round(time.time(), 6), time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str, then: str | None = None) -> None:
        """What has passed belongs to `name`. `then`: the phase that begins with it."""
        now = time.perf_counter()
        self.laps[name], self._last = round(self.laps.get(name, 0.0) + now - self._last, 6), now
        if then:
            self._pulse.mark(then)
