"""How Shoal has things compiled: the same kernels in every process, so that a run which starts again has the same bits.

The compiler tries ways to add a row up and keeps the fastest. Another process, or this one after a restart, may find
another one the fastest, whose last digits differ. With its `deterministic` option it takes one by rule. The option goes
with each compilation: as a setting of the whole process it is lost on the way (on torch 2.11, after the first forward
pass of FlexAttention is compiled it is off, and the backward pass is timed again).
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def same_bits() -> dict[str, Any]:
    """Options for `torch.compile`."""
    import torch._inductor.config as inductor  # slow, and loaded only where something is compiled

    return {"deterministic": True} if hasattr(inductor, "deterministic") else {}
