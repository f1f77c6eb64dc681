"""Attention, causal, forwards and backwards, as the model does it: torch picks the kernel."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from shoal.bench import shapes
from shoal.bench.clock import Clock, digits
from shoal.bench.shapes import BACKWARD, Heads
from shoal.plan.hardware_types import Row


def measure(clock: Clock, seconds: float) -> list[Row]:
    """Rows of batch, heads, kv_heads, seq, head_dim, precision, forward TFLOP/s, backward TFLOP/s."""
    chosen = shapes.ATTENTION if clock.cuda else shapes.ATTENTION_CPU
    precisions = _precisions(clock)
    end = time.monotonic() + seconds
    rows: list[Row] = []
    rate = 0.0
    for heads in chosen:
        for precision, dtype in precisions.items():
            left = end - time.monotonic()
            if len(rows) >= len(precisions) and (left <= 0 or 4 * heads.flops * (1 + BACKWARD) / rate > left):
                continue
            try:
                forward_s, backward_s = _taken(clock, heads, dtype, seconds / len(chosen) / len(precisions))
            except torch.OutOfMemoryError:
                continue
            rate = heads.flops * (1 + BACKWARD) / (forward_s + backward_s)
            forward, backward = heads.flops / forward_s / 1e12, BACKWARD * heads.flops / backward_s / 1e12
            shape = (heads.batch, heads.heads, heads.kv_heads, heads.seq, heads.head_dim)
            rows.append((*shape, precision, digits(forward), digits(backward)))
    return rows


def _precisions(clock: Clock) -> dict[str, torch.dtype]:
    if not clock.cuda:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return {"bf16": torch.bfloat16}
    return {"fp16": torch.float16}


def _taken(clock: Clock, heads: Heads, dtype: torch.dtype, budget_s: float) -> tuple[float, float]:
    def made(count: int) -> torch.Tensor:
        # Heads lie beside each other, as a linear layer leaves them; the kernels see them first.
        shape = (heads.batch, heads.seq, count, heads.head_dim)
        return torch.randn(shape, device=clock.device, dtype=dtype).transpose(1, 2).requires_grad_()

    q, k, v = made(heads.heads), made(heads.kv_heads), made(heads.kv_heads)
    shared = heads.heads != heads.kv_heads

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)

    forward_s = clock.seconds(forward, budget_s / (1 + BACKWARD))
    y = forward()
    gradient = torch.randn_like(y)
    backward_s = clock.seconds(
        lambda: torch.autograd.grad(y, (q, k, v), gradient, retain_graph=True), budget_s * BACKWARD / (1 + BACKWARD)
    )
    return forward_s, backward_s
