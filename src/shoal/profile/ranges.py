"""The loop's own marks as ranges of a trace. The loop needs no line for it: it says what it is doing anyway."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import record_function

from shoal.journal.pulse import Pulse
from shoal.profile.trace import PREFIX


class Ranges(Pulse):
    """A pulse that writes no file: each mark ends one range and begins the next, and says when a step begins."""

    def __init__(self, step_begins: Callable[[], None]) -> None:
        super().__init__(None, 0)
        self._step_begins = step_begins
        self._range: record_function | None = None

    def mark(self, phase: str, step: int | None = None, marks: int | None = None) -> None:
        self.close()
        if step is not None:
            self._step_begins()
        self._range = record_function(f"{PREFIX}{phase}")
        self._range.__enter__()

    def close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
