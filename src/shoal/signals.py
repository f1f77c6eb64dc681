"""Signals that wait."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def held_back(*numbers: int) -> Iterator[None]:
    """These signals arrive after the block. A process started inside it never sees them, from its first instruction."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
