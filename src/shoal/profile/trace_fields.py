"""What a trace says beside names and times, by type: what has another one counts as not said. No torch.

A trace may come from another version of torch, another tool, or a disk that has lost some of it. There are millions of
events, so each field is looked at in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal import values

MOST_NS = 1 << 62
_WHOLE = ("correlation", "External id", "Sequence number", "Fwd thread id")
_ID = ("stream", "device")


def _count(said: object) -> int:
    return values.whole(said, 1 << 40)


def _amount(said: object) -> float:
    return values.real(said, 1e30, 0)


_ABOUT: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("run", "torch", "device", "precision", "format"), values.short),
    **dict.fromkeys(("rank", "steps", "vocab_size", "dim", "tokens_per_step"), _count),
    **dict.fromkeys(("world", "processes_here", "threads", "cores"), lambda said: values.whole(said, 1 << 40, 1)),
    **dict.fromkeys(("compiled", "tf32"), values.flag),
    **dict.fromkeys(("untraced_step_s", "attended", "memory_bytes", "moved_bytes"), _amount),
    **dict.fromkeys(("flops_per_step", "hardware_flops_per_step", "peak_flops", "peak_bandwidth"), _amount),
    "step_s": values.each(_amount),
}


def about(said: object) -> dict[str, Any]:
    """What a profile of ours says of itself; nothing in others'."""
    if not isinstance(said, Mapping):
        return {}
    found: dict[str, Any] = {}
    for name, value in said.items():
        try:
            found[name] = _ABOUT[name](value) if name in _ABOUT else value
        except values.BadValue:
            continue
    return found


def args(said: object) -> dict[str, Any]:
    """Of an event."""
    if type(said) is not dict:
        return {}
    for name in _WHOLE:
        if name in said and (type(said[name]) is not int or not -MOST_NS < said[name] < MOST_NS):
            del said[name]
    for name in _ID:
        if name in said and type(said[name]) not in (int, str):
            del said[name]
    if "Input Dims" in said:
        types = said.get("Input type")
        if not _dims(said["Input Dims"]) or not isinstance(types, list):
            del said["Input Dims"]
    return said


def _dims(said: object, depth: int = 2) -> bool:
    """Lists of sizes, of tensors or of lists of them."""
    if not isinstance(said, list):
        return False
    for one in said:
        if type(one) is int:
            if not 0 <= one < MOST_NS:
                return False
        elif not depth or not _dims(one, depth - 1):
            return False
    return True


def nanoseconds(microseconds: object) -> int:
    return round(values.real(microseconds, 1e18, -1e18) * 1000)
