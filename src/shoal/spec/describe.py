"""Says in words what a value may be: for errors, for the reference page, for `shoal show`."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from shoal.spec.base import Says, Strict

_BOUNDS = {Ge: "at least {}", Gt: "above {}", Le: "at most {}", Lt: "below {}"}


def allowed(field: FieldInfo) -> str:
    """What `field` takes, such as "a whole number of at least 1, or `auto`"."""
    return _phrase(field.annotation, list(field.metadata))


def given(value: Any) -> str:
    """A value as a person would write it, cut short when it is long."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a section"
    text = as_written(value)
    return text if len(text) <= 60 else text[:57] + "…"


def as_written(value: Any) -> str:
    """A value in the spelling of the run file, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_written(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {as_written(v)}" for k, v in value.items()) + "}"
    return repr(value) if isinstance(value, str) else f"{value}"


def _phrase(annotation: Any, marks: Sequence[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *inner = get_args(annotation)
        return _phrase(base, [*_flat(inner), *marks])
    says = next((m.text for m in marks if isinstance(m, Says)), None)
    if says:
        return str(says)
    if origin in (Union, types.UnionType):
        return _either([_phrase(part, marks) for part in get_args(annotation)])
    if origin is Literal:
        return _either([f"`{choice}`" for choice in get_args(annotation)])
    if origin is tuple:
        items = get_args(annotation)
        many = "" if items[-1] is Ellipsis else f"{len(items)} "
        bounds = _bounds(_flat(get_args(items[0])[1:]))
        return f"a list of {many}numbers, each {bounds}" if bounds else "a list of sections"
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return f"a section with names such as {', '.join(list(annotation.model_fields)[:3])}"
    if annotation in (int, float):
        noun, bounds = "a whole number" if annotation is int else "a number", _bounds(marks)
        return f"{noun} of {bounds}" if bounds.startswith("at ") else f"{noun} {bounds}".strip()
    return {bool: "`true` or `false`", str: "text", type(None): "empty"}[annotation]


def _flat(marks: Sequence[Any]) -> list[Any]:
    """Marks with those inside a `Field(ge=…)` taken out of it."""
    return [inner for mark in marks for inner in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]


def _bounds(marks: Sequence[Any]) -> str:
    said = []
    for mark in marks:
        for kind, words in _BOUNDS.items():
            if isinstance(mark, kind):
                limit = getattr(mark, kind.__name__.lower())
                said.append(words.format("2^63" if limit == 2**63 else f"{limit:g}"))
    return " and ".join(dict.fromkeys(said))


def _either(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    comma = "," if any(" " in part for part in parts) else ""
    return ", ".join(parts[:-1]) + f"{comma} or {parts[-1]}"
