"""Whether a GPU gets on with its work, as another thread can see it without waiting for it.

Marks stand in the device's queue; each one that it has passed is a tick. The model puts one behind every block,
forwards and backwards, so a device that computes ticks many times in a step, however long the step takes and however
far the host is ahead. Where no block runs (the optimizer, a save) the thread that asks puts one behind all that is
queued. A device that waits in a collective for a rank that does not come passes none, though its utilisation is 100%:
NCCL's kernels spin. Nor does one that has nothing to do: that is not work.

Nobody waits: marks are asked for by the thread that writes samples (shoal.journal.pulse), and no more than `MOST` are
under way, so a device that hangs holds nobody up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from shoal.journal.pulse_file import Device
from shoal.model.decoder import Decoder

AT_ONCE_S = 0.01  # a mark that is passed so soon had nothing before it that is worth the name of work
MOST = 256  # marks between blocks under way; a host that is further ahead puts no more


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self) -> None:
        """Puts it behind all that the calling thread has queued."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it; never waits."""
        ...


class Ticks:
    def __init__(
        self, make: Callable[[], Event], put: Callable[[], Event], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`make` makes a mark for the threads that compute; `put` puts one behind all that is queued."""
        self._make, self._put, self._sleep = make, put, sleep
        self._ticks = 0
        self._behind: Event | None = None
        self._under_way, self._free = deque[Event](), deque[Event]()  # of blocks; each end has one thread at a time

    def __call__(self) -> Device:
        while self._under_way and self._under_way[0].query():
            self._free.append(self._under_way.popleft())
            self._ticks += 1
        if self._behind is not None:
            if not self._behind.query():
                return Device(self._ticks, queued=True)
            self._ticks += 1
        self._behind = self._put()
        self._sleep(AT_ONCE_S)
        if self._behind.query():
            self._behind = None
        return Device(self._ticks, queued=self._behind is not None)

    def passes(self, hidden: Tensor) -> None:
        """A block has given these; what it computes is queued, not done. Called again when their gradient is there."""
        self._mark()
        if hidden.requires_grad:
            hidden.register_hook(self._mark)

    def _mark(self, _: Tensor | None = None) -> None:
        if len(self._under_way) < MOST:
            event = self._free.popleft() if self._free else self._make()
            event.record()
            self._under_way.append(event)


def ticks_of(device: torch.device, decoders: Iterable[Decoder] = ()) -> Callable[[], Device] | None:
    """To be called from the thread that computes, whose stream is watched. None: the CPU computes."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)

    def put() -> Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    ticks = Ticks(torch.cuda.Event, put)
    for decoder in decoders:
        decoder.passes = ticks.passes
    return ticks
