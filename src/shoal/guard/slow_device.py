"""Says which GPU is slower than the others, by the GPUs' own clocks. Never imports torch.

Each rank tells how long the blocks of a step's forward passes took its device, without what waits for others
(shoal.train.clock), as the median of its last few steps: a compilation or a hiccup in one of them does not show. A card
that is hot, has a lower clock or is shared with another process is slow in every step. It is named once that has lasted
for `STEPS` steps and `SECONDS`. A block waits in it for those with whom its rank shares a layer (tensor, context and
expert parallelism): they all look the same, so then it is such a group that is compared and named.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.guard.others import median_of_others
from shoal.guard.straggler import AGAIN_S, OF_STEP, RATIO, Spent, Straggler

STEPS, SECONDS = 12, 3.0  # three steps of five make a median: 15 in all, and up to three until they are read and seen
DIP = 3  # steps in which it was as quick as the others, that make no difference
SPREAD = 4.0  # … and so many times as far off as the others are from each other: documents differ in length
LEAST_TO_SPREAD = 5
PASSES = 3  # a backward pass takes about two forward passes, and nobody measures it


@dataclass(frozen=True)
class Kin:
    """Who can be compared: ranks of one pipeline stage, which have the same layers, in groups that share each layer."""

    stage: int = 0  # ranks of a stage, one after the other; 0: all of them
    layer: int = 1  # ranks that share a layer, one after the other


@dataclass
class _Slow:
    """Since when one is slow, and until when it was seen to be."""

    step: int
    at: float
    until: int  # a step
    seen_at: float
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))  # lengths of steps between looks

    def goes_on(self, step: int, now: float) -> None:
        if step > self.until:
            self.steps_s.append((now - self.seen_at) / (step - self.until))
            self.until, self.seen_at = step, now


class SlowDevices:
    """Of one group of ranks."""

    def __init__(self, kin: Kin | None = None) -> None:
        self._kin = kin or Kin()
        self._known: dict[int, _Slow] = {}  # by the first rank of its group
        self._told: dict[int, float] = {}

    def look(self, beats: Mapping[int, Spent], now: float) -> list[Straggler]:
        """What has become certain, the slowest first; each is told once in a while."""
        ranks = sorted(beats)
        device_s = np.array([beats[rank].device_s for rank in ranks])
        if len(ranks) < 2 or device_s.min() < 0:
            return []
        if self._known:
            furthest = max(b.steps for b in beats.values())
            self._known = {first: one for first, one in self._known.items() if furthest - one.until <= DIP}
        found = []
        for own_s, usual_s, among in self._slow(ranks, device_s):
            first, step = among[0], min(beats[r].steps for r in among)
            slow = self._known.setdefault(first, _Slow(step, now, step, now))
            slow.goes_on(step, now)
            if step - slow.step < STEPS or now - slow.at < SECONDS or now < self._told.get(first, now):
                continue
            step_s = statistics.median(slow.steps_s)  # of which one or two may have been held up
            if PASSES * (own_s - usual_s) >= OF_STEP * step_s:
                several = among if len(among) > 1 else ()
                found.append(Straggler(first, "compute", own_s, usual_s, step_s, step - slow.step, "device", several))
                self._told[first] = now + AGAIN_S
        return sorted(found, key=lambda s: s.usual_s - s.own_s)

    def _slow(self, ranks: Sequence[int], device_s: NDArray[np.float64]) -> list[tuple[float, float, tuple[int, ...]]]:
        """Now: its time, that of the others, and the ranks."""
        found, layer = [], self._kin.layer
        size = self._kin.stage or len(ranks)
        for at in range(0, len(ranks), size):
            stage = ranks[at : at + size]
            if len(stage) % layer or len(stage) < 2 * layer:
                continue
            own_s = np.median(device_s[at : at + size].reshape(-1, layer), axis=1)
            usual_s = median_of_others(own_s)
            least_s = RATIO * usual_s
            if len(own_s) > LEAST_TO_SPREAD:
                spread_s = 1.4826 * float(np.median(np.abs(own_s - np.median(own_s))))  # as of a normal distribution
                least_s = np.maximum(least_s, usual_s + SPREAD * spread_s)
            slow = np.flatnonzero(own_s > least_s).tolist()
            found += [(float(own_s[i]), float(usual_s[i]), tuple(stage[i * layer : (i + 1) * layer])) for i in slow]
        return found
