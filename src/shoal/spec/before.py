"""What a run file means that an earlier Shoal has resolved: keys that came later have there the value of then.

A resolved file states every key that its version had. So one that states all of these, and not the later one, was
written before there was a choice. (`model.init` is settled so in `shoal.spec.resolve`, beside the presets.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DATA = ("train", "eval", "seq_len", "skip", "mask_documents", "cache_dir", "cache_gb")


def of_then(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections with what the file leaves out and was settled then; empty for a file of today, or one that people
    write."""
    data = values.get("data")
    if not isinstance(data, Mapping) or "packing" in data or not all(name in data for name in _DATA):
        return {}
    return {"data": {"packing": "chop"}}


def as_then(values: Mapping[str, Any]) -> dict[str, Any]:
    """A whole spec, as a checkpoint holds it, with what it meant."""
    then = of_then(values)
    return {**values, **{name: {**values[name], **section} for name, section in then.items()}}
