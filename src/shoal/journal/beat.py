"""What a process knows of its own pace: the phase it is in, and how long each phase and each step has taken so far.

Plain arithmetic over marks, with no clock and no file of its own, so that the same code runs in a worker
(shoal.journal.pulse) and in generated traces (tests/guard/traces.py). Never imports torch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

PHASES = (
    "start",  # imports
    "join",  # rendezvous
    "load",  # data, model, checkpoint
    "data",
    "exchange",  # waiting, after a step, for the numbers that all ranks agree on about the next one
    "forward",
    "backward",  # with the collectives of the gradients
    "compute",  # both, where a pipeline mixes them
    "clip",  # the sums over all ranks after it: loss, gradient norm
    "trade",  # with other islands, and waiting for them
    "optimizer",
    "record",  # the journal, and what else is between two steps
    "evaluate",
    "save",
    "finish",
)
OUTSIDE_STEPS = ("trade", "record", "evaluate", "save")  # take as long as they take; the others are what a step is
DECAY = 0.95  # of the slowest step and of the longest stay in a phase, with each step: after 20 a third is left
LAZY_STEPS = 2  # of an attempt; they set things up and say nothing about the others
# Steps whose median is told of the device: one or two that were held up (a compilation between two of its marks) do
# not show, and a card that has become slow shows after three.
DEVICE_STEPS = 5
UNKNOWN_S = -1.0  # there is no device, or nothing has been measured yet

_NUMBER = {name: i for i, name in enumerate(PHASES)}
_IN_STEP = tuple(name not in OUTSIDE_STEPS for name in PHASES)
_LEAST_S = 1e-9  # what has been measured is more than nothing


class ByPhase(Mapping[str, float]):
    """Seconds of each phase, in the order of PHASES; made for each of thousands of ranks, so of what was read as is."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = seconds

    def __getitem__(self, phase: str) -> float:
        return self._seconds[_NUMBER[phase]]

    def __iter__(self) -> Iterator[str]:
        return iter(PHASES)

    def __len__(self) -> int:
        return len(PHASES)


class Beat(NamedTuple):
    """What a process has told with its last mark. A tuple: a frozen dataclass takes five times as long to make, and
    the watch over thousands of ranks makes one for each of their marks."""

    pid: int
    step: int  # counted from 0: the one under way, or the last
    steps: int  # begun in this attempt
    marks: int
    phase: str
    since: float  # monotonic, of this machine
    slowest_s: float  # recent step, without what is between steps; 0 until one has been measured
    spent_s: Mapping[str, float]  # in each phase since the start, the present one excluded
    longest_s: Mapping[str, float]  # recent stay in each phase; 0 until one has been measured
    device_s: float = UNKNOWN_S  # of a step's own work on the device, the median of the last few


class Marks:
    """The numbers of a beat. A step is measured when the next one begins, and so are the phases that it went through.
    The first steps of an attempt are not: until then nobody knows how long a step takes."""

    def __init__(self, now: float) -> None:
        self.step, self.steps, self.marks, self.phase, self.since = -1, 0, 0, 0, now
        self.slowest_s = self._this_step_s = 0.0
        self.spent_s = [0.0] * len(PHASES)
        self.longest_s = [0.0] * len(PHASES)
        self._stays_s: dict[int, float] = {}  # phase → the longest stay in it since the step began
        self.device_s = UNKNOWN_S
        self._on_device_s = deque[float](maxlen=DEVICE_STEPS)

    def mark(self, phase: str, step: int | None, now: float, marks: int | None = None) -> None:
        """From now on it is doing that. `step`: a step begins. `marks`: how many it has made, where ranks do not all do
        the same and the count must be one that compares."""
        before, stay_s = self.phase, max(now - self.since, _LEAST_S)
        self.spent_s[before] += stay_s
        if stay_s > self._stays_s.get(before, 0.0):
            self._stays_s[before] = stay_s
        if _IN_STEP[before]:
            self._this_step_s += stay_s
        if step is not None:
            if self.steps > LAZY_STEPS:
                self._measured()
            self.step, self.steps, self._this_step_s = step, self.steps + 1, 0.0
            self._stays_s = {}
        self.phase, self.since = _NUMBER[phase], now
        self.marks = self.marks + 1 if marks is None else marks

    def worked(self, seconds: float) -> None:
        """What a step took the device. Known when as many are as one goes by."""
        self._on_device_s.append(seconds)
        if len(self._on_device_s) == DEVICE_STEPS:
            self.device_s = statistics.median(self._on_device_s)

    def beat(self, pid: int) -> Beat:
        phases, spent, longest = PHASES[self.phase], self.spent_s, self.longest_s
        return Beat(
            pid,
            self.step,
            self.steps,
            self.marks,
            phases,
            self.since,
            self.slowest_s,
            ByPhase(tuple(spent)),
            ByPhase(tuple(longest)),
            self.device_s,
        )

    def _measured(self) -> None:
        """A phase that this step did not go through (an evaluation) is remembered as it was."""
        self.slowest_s = max(self._this_step_s, self.slowest_s * DECAY)
        for phase, stay_s in self._stays_s.items():
            self.longest_s[phase] = max(stay_s, self.longest_s[phase] * DECAY)
