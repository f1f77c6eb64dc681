"""Limits that hold on a busy machine: they count seconds of a quiet one.

    until(lambda: file.exists(), 20)                  # a fact, or a failure
    process.communicate(timeout=limit(60))            # where a number must be given
    watch = Stopwatch(); …; assert watch.quiet_s() < 10   # where how long it took is the claim

A second counts as much less as there are more processes that want to run than cores. Quiet, a limit is what it says;
at a load of 40 on two cores it is twenty times that. So it ends what hangs, and nothing that is merely slow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def slowness() -> float:
    """How many times longer than on a quiet machine things take: 1 or more."""
    load = max(os.getloadavg()[:2])  # of the last minute, and of the last five: what is timed may have begun then
    return max(1.0, load / len(os.sched_getaffinity(0)))


def limit(quiet_s: float) -> float:
    """Seconds to wait for what takes less than `quiet_s` on a quiet machine."""
    return quiet_s * slowness()


class Stopwatch:
    """A stopwatch that counts seconds of a quiet machine."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._quiet_s = 0.0

    def quiet_s(self) -> float:
        """Since it was made. Asked often, it knows best how busy the machine was meanwhile."""
        now = time.monotonic()
        self._quiet_s += (now - self._at) / slowness()
        self._at = now
        return self._quiet_s


def until(happened: Callable[[], Any], within_s: float = 20.0, every_s: float = 0.02) -> Any:
    """Waits for a fact and returns it; fails the test when it does not come."""
    watch = Stopwatch()
    while not (found := happened()):
        if watch.quiet_s() > within_s:
            raise AssertionError(f"did not happen within {within_s:g} s of a quiet machine")
        time.sleep(every_s)
    return found
