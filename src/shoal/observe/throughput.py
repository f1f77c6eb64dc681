"""Tokens per second and model FLOPs utilisation (MFU), with the convention named.

Two conventions for the FLOPs of attention are in use and differ by up to 1.9x at long context: counting the whole
attention square (torchtitan, LLM Foundry) or the half below the diagonal that causal attention computes
(Megatron-Bridge since 25.09). Shoal says "causal" and counts the half: `spec.shape.Shape.flops_per_token`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CONVENTION = "causal"

# Dense peak TFLOP/s of one device: (pattern of the device's name, bf16 matrix units, fp32 without TF32).
# Vendors print bf16 with 2:4 sparsity as the headline; these are the dense halves. First match wins. Sources: NVIDIA's
# data sheets of the A100, H100, H200, L4, L40S, A10 and V100; the Blackwell table "GB200 NVL72 / HGX B200" (bf16 5 and
# 4.5 PFLOP/s sparse, fp32 80 and 75); NVIDIA's Ada and Blackwell GeForce white papers (bf16 with float32 accumulation,
# which is what training uses); AMD's CDNA 3 data sheet; the A10G sheet that AWS publishes with its G5 instances.
_PEAKS: tuple[tuple[str, float | None, float], ...] = (
    (r"GB200", 2500, 80),
    (r"B200", 2250, 75),
    (r"H100 NVL", 835, 60),
    (r"H100 PCIe", 756, 51),
    (r"H100|H200|GH200", 989, 67),  # SXM boards; "H100 80GB HBM3" is how an SXM H100 names itself
    (r"A100", 312, 19.5),
    (r"L40S", 362, 91.6),
    (r"L4", 121, 30.3),
    (r"A10G", 70, 35),
    (r"A10", 125, 31.2),
    (r"RTX 4090", 165.2, 82.6),
    (r"RTX 5090", 209.5, 104.8),
    (r"V100[- ]PCIE", None, 14),  # Volta has no bf16 units: torch emulates it, so there is no peak to compare with
    (r"V100", None, 15.7),
    (r"MI300X", 1307.4, 163.4),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of one device, or None where nobody has published one (every CPU): nothing is made up.

    `device_name` is what the driver says (`torch.cuda.get_device_name`); a MIG slice is not the whole device.
    """
    if " MIG " in device_name:
        return None
    for pattern, bf16_tflops, fp32_tflops in _PEAKS:
        if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE):
            tflops = {"bf16": bf16_tflops, "fp32": fp32_tflops}.get(precision)
            return None if tflops is None else tflops * 1e12
    return None


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
