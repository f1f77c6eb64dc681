"""Keeps the index of a journal up to date while the run goes on, so that nobody waits for it later."""

from __future__ import annotations

import contextlib
from pathlib import Path

from shoal.errors import ShoalError
from shoal.journal.journal import LONG_BYTES


class Keeper:
    """For the supervisor: it is there anyway, and nothing that it does holds up a step."""

    def __init__(self, journal: Path, block_bytes: int = LONG_BYTES) -> None:
        self._journal, self._block_bytes, self._done = journal, block_bytes, 0

    def look(self) -> None:
        """To be called often: a `stat`, and every few thousand steps a tenth of a second. What goes wrong here makes
        a later look at the run slower, and no more."""
        with contextlib.suppress(OSError, ShoalError):
            if self._journal.stat().st_size - self._done < self._block_bytes:
                return
            from shoal.journal.index import extend  # numpy: only long runs need it

            self._done = extend(self._journal, self._block_bytes)
