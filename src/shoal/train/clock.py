"""Laps of one step: for its journal record, and for those who watch from outside while it lasts.

There are two clocks. The host's says when it did what, and its laps add up to the step. A GPU works behind the host,
which waits for it once a step, where it reads the loss: the host's laps say little about who took the time. So the
device has a timeline of its own: marks in its queue of work, which it passes when it gets there. They are read a step
later, when the host has waited for the device anyway; nobody ever waits for a mark.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

from shoal.observe.pulse import SILENT, Pulse

# Phases of a step as the device sees them; what comes before the first is waiting for the host and its data.
ON_DEVICE = ("forward", "backward", "compute", "clip", "trade", "optimizer")
WAIT, END = "wait", "record"
WAITING = ("data", "exchange")
KEPT = 4  # steps whose marks are not all passed; more cannot be, as every step reads its loss


class Event(Protocol):
    """A mark in the device's queue: `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...  # milliseconds


class Timeline:
    """The steps of one device."""

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make = make
        self._free: list[Event] = []
        self._marks: list[tuple[str, Event]] = []  # of the step under way
        self._step = 0
        self._ended: deque[tuple[int, list[tuple[str, Event]]]] = deque()

    def begin(self, step: int) -> None:
        """A step begins; marks of one that came to nothing are forgotten."""
        self._free += (event for _, event in self._marks)
        self._step, self._marks = step, []
        self._put(WAIT)

    def mark(self, phase: str) -> None:
        if phase in ON_DEVICE:
            self._put(phase)
        elif phase in WAITING:
            if self._marks and self._marks[-1][0] != WAIT:
                self._put(WAIT)
        elif phase == END and self._marks:
            self._put(END)
            self._ended.append((self._step, self._marks))
            self._marks = []
            while len(self._ended) > KEPT:
                self._free += (event for _, event in self._ended.popleft()[1])

    def read(self) -> dict[str, float] | None:
        """The oldest step that the device has passed and nobody has read: `step`, and seconds of each phase."""
        if not self._ended or not self._ended[0][1][-1][1].query():
            return None
        step, marks = self._ended.popleft()
        spent: dict[str, float] = {}
        for (phase, begin), (_, end) in pairwise(marks):
            spent[phase] = spent.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        self._free += (event for _, event in marks)
        return {"step": step} | {f"{phase}_s": round(seconds, 6) for phase, seconds in spent.items()}

    def _put(self, phase: str) -> None:
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._marks.append((phase, event))


def timeline_of(device: Any) -> Timeline | None:
    """Of a `torch.device`; None where the host computes itself, and its own clock is right."""
    if device.type != "cuda":
        return None
    import torch  # those who train have it

    return Timeline(lambda: torch.cuda.Event(enable_timing=True))


class Clock:
    """Laps of one step; `begin` is wall time, for the ledger."""

    def __init__(self, pulse: Pulse = SILENT, step: int = 0, timeline: Timeline | None = None) -> None:
        """`step` is counted from 0: the one that is taken next."""
        pulse.mark("data", step)
        if timeline is not None:
            timeline.begin(step + 1)
        self._pulse, self._timeline = pulse, timeline
        self.begin, self._last = round(time.time(), 6), time.perf_counter()
        self.laps: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """What begins now, for those who watch and for the device's timeline."""
        self._pulse.mark(phase)
        if self._timeline is not None:
            self._timeline.mark(phase)

    def lap(self, name: str, then: str | None = None) -> None:
        """What has passed belongs to `name`. `then`: the phase that begins with it."""
        now = time.perf_counter()
        self.laps[name], self._last = round(self.laps.get(name, 0.0) + now - self._last, 6), now
        if then:
            self.mark(then)

    def fields(self) -> dict[str, Any]:
        """For the step's record: its laps; of a GPU also the phases of an earlier step, which it has passed by now."""
        passed = None if self._timeline is None else self._timeline.read()
        return {"time": self.laps} | ({} if passed is None else {"device": passed})
