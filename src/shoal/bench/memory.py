"""What moves bytes and computes next to nothing: copies, norms; and what a kernel costs that does nothing at all."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.nn.functional as F

from shoal.bench import shapes
from shoal.bench.clock import Clock, digits
from shoal.plan.hardware_types import Row


def copies(clock: Clock, seconds: float) -> list[Row]:
    """Rows of bytes (read and written), GB/s; the largest first."""
    sizes = shapes.COPIED if clock.cuda else shapes.COPIED_CPU
    rows: list[Row] = []
    for size in sizes:
        try:
            source = torch.ones(size, dtype=torch.uint8, device=clock.device)
            target = torch.empty_like(source)
            taken = clock.seconds(lambda a=source, b=target: b.copy_(a), seconds / len(sizes))  # type: ignore[misc]
        except torch.OutOfMemoryError:
            continue
        rows.append((2 * size, digits(2 * size / taken / 1e9)))
    return rows


def norms(clock: Clock, seconds: float) -> list[Row]:
    """RMSNorm, the model's most frequent pass. Rows of bytes (read and written), GB/s."""
    chosen = shapes.NORMED if clock.cuda else shapes.NORMED_CPU
    half = clock.cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if half else torch.float32
    rows: list[Row] = []
    for tokens, dim in chosen:
        x = torch.randn(tokens, dim, device=clock.device, dtype=dtype)
        weight = torch.ones(dim, device=clock.device, dtype=dtype)
        taken = clock.seconds(lambda x=x, w=weight: F.rms_norm(x, w.shape, w, 1e-5), seconds / len(chosen))  # type: ignore[misc]
        moved = 2 * x.numel() * x.element_size()
        rows.append((moved, digits(moved / taken / 1e9)))
    return rows


def launch_us(clock: Clock, rounds: int = 7, count: int = 300) -> float:
    """Microseconds of a kernel of one number in a row of them: the pace at which the host can hand out work."""
    x = torch.zeros(1, device=clock.device)
    taken = []
    for _ in range(rounds):
        _wait(clock)
        began_s = time.perf_counter()
        for _ in range(count):
            x.add_(1.0)
        _wait(clock)
        taken.append((time.perf_counter() - began_s) / count)
    return digits(median(taken[1:]) * 1e6)


def host_link_gbs(clock: Clock, size: int = 128 << 20) -> float:
    """GB/s from the host to the GPU: what joins GPUs that have nothing better."""
    source = torch.ones(size, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=clock.device)
    taken = clock.seconds(lambda: target.copy_(source, non_blocking=True), 0.2)
    return digits(size / taken / 1e9)


def _wait(clock: Clock) -> None:
    if clock.cuda:
        torch.cuda.synchronize(clock.device)
