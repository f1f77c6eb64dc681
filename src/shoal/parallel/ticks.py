"""Whether a GPU gets on with its work, as another thread can see it without waiting for it.

A mark is put behind all that is queued for the device; when the device has passed it, that is a tick, and the next mark
is put. A device that computes ticks about as often as it is asked, however long a step takes: no more than about 1,024
kernels are ever queued. One that waits in a collective for a rank that does not come does not tick, though its
utilisation is 100%: NCCL's kernels spin. Nor does one that has nothing to do: that is not work.

The main thread has no part in it: the marks are put and asked for by the thread that writes samples (shoal.observe.
pulse), and only one is under way, so a device that hangs cannot make that thread wait either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from shoal.observe.pulse import Device

AT_ONCE_S = 0.01  # a mark that is passed so soon had nothing before it that is worth the name of work


class Event(Protocol):
    """As torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has passed it; never waits."""
        ...


class Ticks:
    def __init__(self, put: Callable[[], Event], sleep: Callable[[float], None] = time.sleep) -> None:
        """`put` puts a mark behind all that is queued."""
        self._put, self._sleep = put, sleep
        self._ticks = 0
        self._event: Event | None = None

    def __call__(self) -> Device:
        if self._event is not None:
            if not self._event.query():
                return Device(self._ticks, queued=True)
            self._ticks += 1
        self._event = self._put()
        self._sleep(AT_ONCE_S)
        if self._event.query():
            self._event = None
        return Device(self._ticks, queued=self._event is not None)


def ticks_of(device: torch.device) -> Callable[[], Device] | None:
    """To be called from the thread that computes, whose stream is watched. None: the CPU computes."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)

    def put() -> Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    return Ticks(put)
