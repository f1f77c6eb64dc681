"""Tokens per second and model FLOPs utilisation (MFU), with the convention named.

Two conventions for the FLOPs of attention are in use and differ by up to 1.9x at long context: counting the whole
attention square (torchtitan, LLM Foundry) or the half below the diagonal that causal attention computes
(Megatron-Bridge since 25.09). Shoal says "causal" and counts the half: `spec.shape.Shape.flops_per_token`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError

CONVENTION = "causal"

# Cut-down boards under a product's name: what the catalogue knows of that product is not theirs.
_OTHER_SILICON = re.compile(r"\b(?:laptop|max-q|mig)\b|\bd$", re.IGNORECASE)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of one device, as the planner's catalogue has it, or None where nobody has published one (every
    CPU): nothing is made up.

    `device_name` is what the driver says (`torch.cuda.get_device_name`); a MIG slice is not the whole device.
    """
    from shoal.plan.catalogue import find  # reads files: not for those who only want a speed

    if _OTHER_SILICON.search(device_name):
        return None
    try:
        device = find(device_name)
    except SpecError:
        return None
    tflops = None if device.is_cpu else device.peak.get(precision)
    return None if tflops is None else tflops * 1e12


def duration_s(record: Mapping[str, Any]) -> float:
    """Wall time of a record that says when it began; a clock that was set back gives 0."""
    return max(0.0, float(record["t"]) - float(record.get("begin", record["t"])))


def tokens_per_s(step: Mapping[str, Any]) -> float:
    """Tokens of a `step` record over its wall time, data wait included."""
    took_s = duration_s(step)
    return float(step["tokens"]) / took_s if took_s > 0 else 0.0


def mfu(rate_tokens_per_s: float, start: Mapping[str, Any] | None) -> float | None:
    """Share of the peak of all devices, from the attempt's `start` record; None where the peak is unknown."""
    if not start or not start.get("peak_flops") or not start.get("flops_per_token"):
        return None
    all_devices_flops = float(start["peak_flops"]) * int(start.get("world", 1))
    return rate_tokens_per_s * float(start["flops_per_token"]) / all_devices_flops
