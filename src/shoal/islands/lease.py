"""The sign in the run directory that an epoch lives. Its first member renews it, and commits nothing when it cannot.

Whoever finds it unchanged for longer than it may be old knows that nobody commits any more, without comparing clocks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

RENEW_S = 2.0
FRESH_S = 20.0  # a commit needs a lease that was renewed within this time
DEAD_S = FRESH_S + 5.0  # … and whoever watches it unchanged for this long may go on without them


def now() -> float:
    """Goes on while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Lease:
    def __init__(self, folder: Path, is_over: Callable[[int], bool] = lambda epoch: False) -> None:
        """`is_over`: whether there is a later epoch than that one."""
        self._path, self._is_over = folder / "lease.json", is_over
        self._held: int | None = None
        self._renewed = float("-inf")
        self._wake, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def hold(self, mine: bool, epoch: int) -> None:
        """From now on, or no longer. The file is written in a thread: a disk that hangs must not stop the watcher."""
        if mine and self._held is None:
            self._renewed = now()  # the epoch itself has just been written
        self._held = epoch if mine else None
        if mine and self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="fleet-lease", daemon=True)
            self._thread.start()
        self._wake.set()

    def fresh(self) -> bool:
        return now() - self._renewed < FRESH_S

    def read(self) -> str:
        """Changes as long as somebody renews it."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def _renew(self) -> None:
        count = 0
        while not self._closed:
            if (held := self._held) is not None:
                began, count = now(), count + 1
                try:
                    self._write(json.dumps({"epoch": held, "count": count, "pid": os.getpid()}))
                    # Whoever was frozen for long may be too late: others have found the lease old, and gone on.
                    if not self._is_over(held):
                        self._renewed = began
                except OSError:
                    pass  # it gets old
            self._wake.wait(RENEW_S)
            self._wake.clear()

    def _write(self, text: str) -> None:
        temporary = self._path.with_name(f".lease.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(self._path)
