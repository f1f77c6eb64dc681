"""How long a piece of work takes: the median of rounds, warm, with cold caches on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from shoal.bench.machine import Machine

ROUNDS = (3, 100)  # at least, at most
FLUSHED_BYTES = 128 << 20  # where nobody says how large the cache is: the largest (B200) has 126 MB

Work = Callable[[], object]


class Clock:
    """Times work on a device. A GPU's cache is emptied before each round: in a step, whoever comes next finds in it
    what came before, not its own operands."""

    def __init__(self, machine: Machine) -> None:
        self.device = machine.device
        self.cuda = machine.cuda
        if self.cuda:
            flushed = 2 * machine.cache_bytes or FLUSHED_BYTES
            self._flush = torch.empty(flushed, dtype=torch.uint8, device=self.device)

    def seconds(self, work: Work, budget_s: float) -> float:
        """The median of as many rounds as `budget_s` has room for, and of a few where it has none."""
        return self._on_gpu(work, budget_s) if self.cuda else _on_cpu(work, budget_s)

    def warm_up(self, seconds: float) -> None:
        """An idle GPU lowers its clock; it takes a while to come back."""
        if not self.cuda:
            return
        x = torch.randn(4096, 4096, device=self.device, dtype=torch.float16)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                x @ x
            torch.cuda.synchronize(self.device)

    def _on_gpu(self, work: Work, budget_s: float) -> float:
        for _ in range(2):  # the first call looks for a kernel and loads it
            work()
        once = self._rounds(work, 1)[0]
        fit = int(budget_s / (once + 5e-5))  # and the flush
        return median(self._rounds(work, min(max(fit, ROUNDS[0]), ROUNDS[1])))

    def _rounds(self, work: Work, count: int) -> list[float]:
        """Everything is queued before anything is waited for, so that the host's pace is not measured."""
        pairs = []
        for _ in range(count):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def digits(value: float) -> float:
    """As many digits as a measurement is good for."""
    return float(f"{value:.4g}")


def _on_cpu(work: Work, budget_s: float) -> float:
    began_s = time.perf_counter()
    work()
    first_s = time.perf_counter() - began_s
    taken: list[float] = []
    while len(taken) < ROUNDS[0] or (len(taken) < ROUNDS[1] and sum(taken) < budget_s):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
        if first_s > budget_s:
            break
    return median(taken)
