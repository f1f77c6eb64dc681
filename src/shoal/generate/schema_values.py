"""The parts of a JSON schema that have no parts: numbers, lists of values, types; and what is counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal import values
from shoal.values import BadValue, inside, shown

MOST_PARTS = 20_000
MOST_COUNT = 100_000  # characters or items that are asked for; more are never needed, and cost the compiler
MOST_NUMBER = 1 << 53  # beyond it, documents lose digits
LENGTHS = ("minLength", "maxLength")
OF_TYPE = {
    "string": {*LENGTHS, "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "boolean": set(),
    "null": set(),
}
OF_TYPE["integer"] = OF_TYPE["number"]
Schema = dict[str, Any]


def number(kind: str, rest: Schema) -> Schema:
    low, high = _bounds(rest)
    made: Schema = {"type": kind}
    if "multipleOf" in rest:
        with inside("multipleOf"):
            if kind != "integer" or low is not None or high is not None:
                raise BadValue("it is supported in integers without other limits alone; leave it out")
            return made | {"multipleOf": values.whole(rest["multipleOf"], 100, 1)}
    if kind == "integer":
        least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
        most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
        if least is not None and most is not None and least > most:
            raise BadValue("no integer lies between", "minimum")
        return made | _given(minimum=least, maximum=most)
    if low is not None and high is not None:
        room = high[0] - low[0]
        if room < 0 or (room == 0 and (low[1] or high[1])):
            raise BadValue("no number lies between", "minimum")
        if 0 < room < 1e-4:
            raise BadValue("numbers so near to each other cannot be kept apart (six digits are)", "minimum")
    if low is not None:
        made["exclusiveMinimum" if low[1] else "minimum"] = low[0]
    if high is not None:
        made["exclusiveMaximum" if high[1] else "maximum"] = high[0]
    return made


def _given(**parts: int | None) -> Schema:
    return {name: value for name, value in parts.items() if value is not None}


def _bounds(rest: Schema) -> tuple[tuple[float, bool] | None, tuple[float, bool] | None]:
    """The tighter one below and above, each with whether it is left out itself."""

    def of(plain: str, exclusive: str) -> list[tuple[float, bool]]:
        found = []
        for name, out in ((plain, False), (exclusive, True)):
            if name in rest:
                with inside(name):
                    values.real(rest[name], MOST_NUMBER, -MOST_NUMBER)
                found.append((rest[name], out))
        return found

    low, high = of("minimum", "exclusiveMinimum"), of("maximum", "exclusiveMaximum")
    return max(low, default=None), min(high, key=lambda edge: (edge[0], not edge[1]), default=None)


def enum(rest: Schema) -> Schema:
    with inside("enum"):
        said = values.items(rest["enum"], MOST_PARTS)
        kinds = types(rest) if "type" in rest else None
        fit = [one for one in said if kinds is None or any(IS[kind](one) for kind in kinds)]
        if not fit:
            raise BadValue("none of it is a document")
    alone(rest, "enum", "type")
    return {"enum": fit}


def const(rest: Schema) -> Schema:
    alone(rest, "const", "type")
    return enum({**{k: v for k, v in rest.items() if k != "const"}, "enum": [rest["const"]]})


def alone(rest: Schema, *names: str) -> None:
    if beside := sorted(rest.keys() - set(names)):
        raise BadValue(f"it is not supported beside {names[0]}; leave one out", shown(beside[0]))


IS: Mapping[str, Callable[[object], bool]] = {
    "string": lambda one: isinstance(one, str),
    "integer": lambda one: type(one) is int or (isinstance(one, float) and one.is_integer()),
    "number": lambda one: type(one) in (int, float),
    "array": lambda one: isinstance(one, list),
    "object": lambda one: isinstance(one, dict),
    "boolean": lambda one: isinstance(one, bool),
    "null": lambda one: one is None,
}


def types(rest: Schema) -> list[str]:
    """Those that are asked for; where none is, those that the other words are about, or any."""
    if "type" not in rest:
        return [kind for kind in ("string", "number", "array", "object") if (OF_TYPE[kind] - {"format"}) & rest.keys()]
    with inside("type"):
        said = rest["type"] if isinstance(rest["type"], list) else [rest["type"]]
        kinds = list(dict.fromkeys(values.one_of(one, OF_TYPE.keys()) for one in values.items(said, 100)))
        if not kinds:
            raise BadValue("an empty list")
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]


def span(rest: Schema, low: str, high: str) -> tuple[int, int | None]:
    with inside(low):
        least = values.whole(rest.get(low, 0), MOST_COUNT)
    with inside(high):
        most = None if high not in rest else min(values.whole(rest[high]), MOST_COUNT)
    if most is not None and most < least:
        raise BadValue(f"{most} is less than {low}, {least}", high)
    return least, most
