"""Laps of one step: for its journal record, and for those who watch from outside while it lasts.

There are two clocks. The host's says when it did what, and its laps add up to the step. A GPU works behind the host,
which waits for it once a step, where it reads the loss: the host's laps say little about who took the time. So the
device has a timeline of its own: marks in its queue of work, which it passes when it gets there. They are read a step
later, when the host has waited for the device anyway; nobody ever waits for a mark.

Phases take as long as the slowest rank makes them: collectives wait. What a device needs for its own work is seen in
the blocks of the forward passes. They are marked apart, from where their weights have been gathered (FSDP) to their
end; no collective of data or pipeline parallelism is in between (shoal.parallel.timed).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from shoal.journal.pulse import SILENT, Pulse

# Phases of a step as the device sees them; what comes before the first is waiting for the host and its data.
ON_DEVICE = ("forward", "backward", "compute", "clip", "trade", "optimizer")
WAIT, END = "wait", "record"
WAITING = ("data", "exchange")
MOST_BLOCKS = 64  # that are marked in a step; what comes after them takes as long
KEPT = 4  # steps whose marks are not all passed; more cannot be, as every step reads its loss


class Event(Protocol):
    """A mark in the device's queue: `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...  # milliseconds


@dataclass
class _Step:
    """The marks of a step."""

    number: int
    phases: list[tuple[str, Event]] = field(default_factory=list)
    blocks: list[tuple[Event, Event]] = field(default_factory=list)  # begin and end of the first of them
    passed: int = 0  # blocks in all

    @property
    def events(self) -> Iterator[Event]:
        yield from (event for _, event in self.phases)
        for pair in self.blocks:
            yield from pair


class Timeline:
    """The steps of one device."""

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make = make
        self._free: list[Event] = []
        self._now: _Step | None = None  # the step under way
        self._block: Event | None = None  # the begin of the block under way
        self._ended: deque[_Step] = deque()
        self.own_s: float | None = None  # what the blocks' forward passes took, of the step that was read last

    def begin(self, step: int) -> None:
        """A step begins; marks of one that came to nothing are forgotten."""
        if self._now is not None:
            self._free += self._now.events
        self._now = _Step(step)
        self._put(WAIT)

    def enter(self) -> None:
        """A block of a forward pass begins. Between steps (an evaluation) nothing is marked."""
        if self._now is not None:
            self._now.passed += 1
            self._block = self._event() if len(self._now.blocks) < MOST_BLOCKS else None

    def gathered(self) -> None:
        """It begins here: until now it has waited for its weights."""
        if self._block is not None:
            self._block.record()

    def leave(self) -> None:
        """It has ended."""
        if self._now is not None and self._block is not None:
            self._now.blocks.append((self._block, self._event()))
        self._block = None

    def mark(self, phase: str) -> None:
        now = self._now
        if now is None:
            return
        if phase in ON_DEVICE:
            self._put(phase)
        elif phase in WAITING:
            if now.phases[-1][0] != WAIT:
                self._put(WAIT)
        elif phase == END:
            self._put(END)
            self._ended.append(now)
            self._now = self._block = None
            while len(self._ended) > KEPT:
                self._free += self._ended.popleft().events

    def read(self) -> dict[str, float] | None:
        """The oldest step that the device has passed and nobody has read: `step`, and seconds of each phase."""
        if not self._ended or not self._ended[0].phases[-1][1].query():
            return None
        step = self._ended.popleft()
        spent: dict[str, float] = {}
        for (phase, begin), (_, end) in pairwise(step.phases):
            spent[phase] = spent.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        blocks_s = [begin.elapsed_time(end) / 1e3 for begin, end in step.blocks if begin.query() and end.query()]
        self.own_s = step.passed * sum(blocks_s) / len(blocks_s) if blocks_s else None
        self._free += step.events
        return {"step": step.number} | {f"{phase}_s": round(seconds, 6) for phase, seconds in spent.items()}

    def _put(self, phase: str) -> None:
        assert self._now is not None
        self._now.phases.append((phase, self._event()))

    def _event(self) -> Event:
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event


def timeline_of(device: Any, decoders: Iterable[Any] = ()) -> Timeline | None:
    """Of a `torch.device`, which sees the blocks of these `Decoder`s; None where the host computes itself, and its own
    clock is right."""
    if device.type != "cuda":
        return None
    import torch  # those who train have it

    from shoal.parallel.timed import time_blocks

    timeline = Timeline(lambda: torch.cuda.Event(enable_timing=True))
    time_blocks(decoders, timeline)
    return timeline


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

    def waits(self, phase: str) -> None:
        """What the host waits for, for those who watch: the device has gone on."""
        self._pulse.mark(phase)

    def lap(self, name: str, then: str | None = None) -> None:
        """What has passed belongs to `name`. `then`: the phase that begins with it."""
        now = time.perf_counter()
        self.laps[name], self._last = round(self.laps.get(name, 0.0) + now - self._last, 6), now
        if then:
            self.mark(then)

    def fields(self) -> dict[str, Any]:
        """For the step's record: its laps; of a GPU also the phases of an earlier step, which it has passed by now."""
        passed = None if self._timeline is None else self._timeline.read()
        if passed is not None and self._timeline is not None and self._timeline.own_s is not None:
            self._pulse.worked(self._timeline.own_s)
        return {"time": self.laps} | ({} if passed is None else {"device": passed})
