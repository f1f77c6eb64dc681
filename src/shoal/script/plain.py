"""Values of plain types as JSON and back, exactly: tuples stay tuples, and keys that are no text stay what they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

_KINDS = {"tuple": tuple, "pairs": dict, "counter": Counter}


class NotPlain(Exception):
    """A value that only its own program can read."""


def to_json(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_json(item) for item in value]
    if type(value) is tuple:
        return {"": "tuple", "of": [to_json(item) for item in value]}
    if type(value) is dict and all(type(key) is str and key for key in value):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "pairs"
        return {"": kind, "of": [[to_json(key), to_json(item)] for key, item in value.items()]}
    raise NotPlain(type(value).__name__)


def from_json(said: Any) -> Any:
    if isinstance(said, list):
        return [from_json(item) for item in said]
    if not isinstance(said, dict):
        return said
    if "" not in said:
        return {key: from_json(item) for key, item in said.items()}
    items = [from_json(item) for item in said["of"]]
    return tuple(items) if said[""] == "tuple" else _KINDS[said[""]](dict(items))
