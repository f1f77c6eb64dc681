"""What a GPU did in a traced turn: computed, only sent (exposed), or nothing at all (idle)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float]


def shares(events: Iterable[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Of the turn's time on the host's clock, begun and ended with an idle device. Nothing without kernels.

    `exposed`: a kernel of NCCL runs and nothing else does; `idle`: nothing runs."""
    done = [e for e in events if e.get("cat") in WORK and e.get("ph") == "X"]
    if not done:
        return {}
    sent = _union([_span(e) for e in done if "nccl" in e["name"].lower()])
    computed = _union([_span(e) for e in done if "nccl" not in e["name"].lower()])
    both = _length(_union([*sent, *computed]))
    whole = seconds * 1e6
    return {
        "exposed": (both - _length(computed)) / whole,
        "idle": max(0.0, 1 - both / whole),
        "sending": _length(sent) / whole,
    }


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _union(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _length(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans)
