"""What every system is asked: the same model, batches and clock. Each runs in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

VOCAB = 128_256
WARM = 4


@dataclass(frozen=True)
class Size:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    batch: int
    seq: int = 4096
    recompute: str = "none"  # or full, as both systems mean it
    moments: str = "fp32"  # of AdamW; bf16: torchtitan then has all it holds in bf16, having no such choice
    few: int | None = None  # steps at most, where one takes many seconds; one more to warm up

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


SIZES = {
    "tiny": Size(2, 256, 4, 2, 1024, 2, 256),  # to try the scripts
    "1b": Size(16, 2048, 32, 8, 8192, 8),
    "3b": Size(28, 3072, 24, 8, 8192, 4),
    "8b": Size(32, 4096, 32, 8, 14336, 2, moments="bf16"),
    "1b-32k": Size(16, 2048, 32, 8, 8192, 1, 32768),
    "1b-128k": Size(16, 2048, 32, 8, 8192, 1, 131072, recompute="full", few=2),
}


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
