"""Tokens per second and model FLOPs utilisation (MFU), with the convention named.

Two conventions for the FLOPs of attention are in use and differ by up to 1.9x at long context: counting the whole
attention square (torchtitan, LLM Foundry) or the half below the diagonal that causal attention computes
(Megatron-Bridge since 25.09). Shoal says "causal" and counts the half, and of packed documents each one's own half
(`shoal.spec.flops`): what lies between documents is never computed.

A speed is that of whole steps which have settled: not of an attempt's first steps, which compile and fill caches, and
not of evaluations and saves between steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.plan.catalogue import Device

CONVENTION = "causal"
# Steps at the beginning of an attempt that compile, fill caches and count traffic.
FIRST = 3
# Steps that "now" is: one slow step should not make a figure jump.
RECENT = 30

# Cut-down boards under a product's name: what the catalogue knows of that product is not theirs.
_OTHER_SILICON = re.compile(r"\b(?:laptop|max-q|mig)\b|\bd$", re.IGNORECASE)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of one device, as the planner's catalogue has it, or None where nobody has published one (every
    CPU): nothing is made up.

    `device_name` is what the driver says (`torch.cuda.get_device_name`); a MIG slice is not the whole device.
    """
    device = catalogued(device_name)
    tflops = None if device is None else device.peak.get(precision)
    return None if tflops is None else tflops * 1e12


def catalogued(device_name: str) -> Device | None:
    """The catalogue's entry of an accelerator by its driver's name."""
    from shoal.plan.catalogue import find  # reads files: not for those who only want a speed

    if _OTHER_SILICON.search(device_name):
        return None
    try:
        device = find(device_name)
    except SpecError:
        return None
    return None if device.is_cpu else device


def duration_s(record: Mapping[str, Any]) -> float:
    """Wall time of a record that says when it began; a clock that was set back gives 0."""
    return max(0.0, float(record["t"]) - float(record.get("begin", record["t"])))


def tokens_per_s(step: Mapping[str, Any]) -> float:
    """Tokens of a `step` record over its wall time, data wait included."""
    took_s = duration_s(step)
    return float(step["tokens"]) / took_s if took_s > 0 else 0.0


def flops(step: Mapping[str, Any], start: Mapping[str, Any] | None) -> float | None:
    """Model FLOPs of a `step` record. Journals of older versions state FLOPs per token in the `start` record instead,
    as if every window were one document."""
    if (counted := step.get("flops")) is not None:
        return float(counted)
    per_token = (start or {}).get("flops_per_token")
    return None if per_token is None else float(per_token) * float(step["tokens"])


def of_peak(flops_per_s: float | None, start: Mapping[str, Any] | None) -> float | None:
    """Share of the peak of all devices, from the attempt's `start` record; None where either is unknown."""
    if flops_per_s is None or not start or not start.get("peak_flops"):
        return None
    return flops_per_s / (float(start["peak_flops"]) * int(start.get("world", 1)))


def mfu(step: Mapping[str, Any], start: Mapping[str, Any] | None) -> float | None:
    """Of one step."""
    counted, took_s = flops(step, start), duration_s(step)
    return None if counted is None or took_s <= 0 else of_peak(counted / took_s, start)


def settled(steps: Sequence[Mapping[str, Any]], starts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps that say how fast a run is: all but the first of each attempt. Where there are no others, the newest,
    which has the least of it."""
    began = {start.get("attempt"): int(start.get("step", 0)) for start in starts}
    found = [r for r in steps if int(r["step"]) - began.get(r.get("attempt"), -FIRST) > FIRST]
    return found or list(steps[-1:])


@dataclass(frozen=True)
class Rate:
    """Of some steps, without what was between them."""

    tokens_per_s: float
    step_s: float
    mfu: float | None
    data_wait: float  # share of the time


def recent(steps: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]) -> Rate | None:
    """The speed now: of the newest settled steps of the newest attempt."""
    newest = steps[-1].get("attempt") if steps else None
    counted = settled([r for r in steps if r.get("attempt") == newest], starts)[-RECENT:]
    seconds = sum(duration_s(r) for r in counted)
    if seconds <= 0:
        return None
    start = next((s for s in reversed(starts) if s.get("attempt") == newest), None)
    computed = [flops(r, start) for r in counted]
    known = None if None in computed else sum(f for f in computed if f is not None) / seconds
    waited_s = sum(float((r.get("time") or {}).get("data_s", 0.0)) for r in counted)
    tokens = sum(float(r["tokens"]) for r in counted)
    taken = sum(int(r.get("steps", 1)) for r in counted)  # a record of a script may stand for several
    return Rate(tokens / seconds, seconds / taken, of_peak(known, start), waited_s / seconds)
