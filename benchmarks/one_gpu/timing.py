"""What every system is asked: the same model, batches and clock. Each runs in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median

import torch
from benchmarks.one_gpu.sizes import VOCAB, Size
from torch import Tensor

WARM = 4


def batches(size: Size, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and their targets [batch, seq], on the host."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, VOCAB, (count, size.batch, size.seq + 1), generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def measure(name: str, size: Size, step: Callable[[int], float], began: float, steps: int) -> None:
    """Prints tokens/s of the median step, the peak of memory, when the first step was done, and the last loss."""
    times, loss, first = [], 0.0, 0.0
    warm, steps = (WARM, steps) if size.few is None else (1, size.few)
    for i in range(warm + steps):
        before = time.perf_counter()
        loss = step(i)  # ends with a number on the host: the device is done
        times.append(time.perf_counter() - before)
        if i == 0:
            first = time.time() - began
        if i == warm - 1:
            torch.cuda.reset_peak_memory_stats()
    seconds = median(times[warm:])
    told = {
        "name": name,
        "tokens_s": round(size.tokens / seconds),
        "ms": round(seconds * 1e3, 2),
        "gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "first_step_s": round(first, 1),
        "loss": round(loss, 4),
    }
    print(json.dumps(told), flush=True)
