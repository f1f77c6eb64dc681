"""Random JSON schemas of what people write: nested objects and arrays with bounds, enums, patterns, ranges, choices,
lists that refer to themselves."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("name", "a", "b", "c", "x y", "größe", 'q"t', "", "0", "items", "type", "$ref", "日本")
PATTERNS = (
    *("^[a-z]{2,6}$", r"^\d{4}-\d\d$", "^(yes|no|maybe)$", "[A-F0-9]{1,8}", r"^\w+@\w+\.(com|org)$", "^a*b+c?$"),
    *(r"^[^\"\\]{1,5}$", "^.{3}$", r"^\s?x$", "^(é|ü|日){1,3}$", r"^[+\-]?[0-9]{1,3}(\.[0-9]+)?$"),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -3,
    1.5,
    1e-7,
    12345678901,
    "",
    "red",
    'a"b\\',
    "é\n",
    [],
    [1, "x"],
    {"k": None},
)


def document_schema(rng: Random) -> dict[str, Any]:
    """A whole one: with parts that are referred to, a linked list and a tree among them."""
    reference = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    node = {"type": "object", "properties": {"value": schema_of(rng, 0), "next": reference}, "required": ["next"]}
    tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": rng.randint(0, 2)}
    return {**schema_of(rng), "$defs": {"node": node, "tree": tree, "plain": schema_of(rng, 0)}}


def schema_of(rng: Random, depth: int = 3) -> dict[str, Any]:
    kinds = [_string, _string, _number, _integer, _enum, _plain]
    if depth > 0:
        kinds += [_object, _object, _array, _array, _choice, _reference]
    made = rng.choice(kinds)(rng, depth)
    if rng.random() < 0.2:
        made["description"] = "what it is"
    return made


def _string(rng: Random, _: int) -> dict[str, Any]:
    how = rng.randrange(4)
    if how == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if how == 1:
        return {"type": "string", "format": rng.choice(("date", "time", "date-time", "uuid", "ipv4", "colour"))}
    least = rng.choice((0, 0, 1, 5))
    return {"type": "string", "minLength": least, "maxLength": least + rng.choice((0, 1, 8, 30))}


def _number(rng: Random, _: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "number"}
    low = rng.choice((0, -1.5, 0.25, -1000, 3.14159, 1e-3, rng.uniform(-50, 50), rng.uniform(-1, 1)))
    if rng.random() < 0.7:
        made[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.7:
        made[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((1, 0.5, 7, 1e6, rng.uniform(0.01, 3)))
    return made


def _integer(rng: Random, _: int) -> dict[str, Any]:
    if rng.random() < 0.1:
        return {"type": "integer", "multipleOf": rng.choice((2, 7, 10))}
    made: dict[str, Any] = {"type": "integer"}
    low = rng.choice((0, -1, 1, -100, 99, -(10**9), rng.randrange(-5000, 5000)))
    if rng.random() < 0.7:
        made[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.7:
        made[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((2, 9, 10, 1234, 10**12))
    return made


def _enum(rng: Random, _: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"const": rng.choice(VALUES)}
    return {"enum": rng.sample(VALUES, rng.randint(1, 5))}


def _plain(rng: Random, _: int) -> dict[str, Any]:
    kinds = ["boolean", "null", "integer", "number"]
    return {"type": rng.choice(kinds) if rng.random() < 0.7 else rng.sample(kinds[:3], 2)}


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 5))
    if not names:
        return {"type": "object", "additionalProperties": schema_of(rng, 0), "maxProperties": rng.randint(0, 3)}
    made: dict[str, Any] = {"type": "object", "properties": {name: schema_of(rng, depth - 1) for name in names}}
    made["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.3:
        made["additionalProperties"] = rng.random() < 0.5
    if rng.random() < 0.3:
        made["maxProperties"] = rng.randint(len(made["required"]), len(names))
    if rng.random() < 0.3:
        made["minProperties"] = rng.randint(0, made.get("maxProperties", len(names)))
    return made


def _array(rng: Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array", "items": schema_of(rng, depth - 1)}
    first = rng.randint(1, 3) if rng.random() < 0.3 else 0
    if first:
        made["prefixItems"] = [schema_of(rng, depth - 1) for _ in range(first)]
        if rng.random() < 0.3:
            return {**made, "items": False}
    least = rng.choice((0, 0, 1, 3))
    return {**made, "minItems": least, "maxItems": least + rng.choice((0, 1, 2, 4))}


def _choice(rng: Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        kinds = rng.sample(
            ({"type": "string", "maxLength": 4}, {"type": "null"}, {"type": "boolean"}, {"enum": [1, 2]}), 2
        )
        return {"oneOf": kinds}
    if rng.random() < 0.2:
        return {"allOf": [schema_of(rng, depth - 1)]}
    return {"anyOf": [schema_of(rng, depth - 1) for _ in range(rng.randint(1, 3))], "title": "one of"}


def _reference(rng: Random, _: int) -> dict[str, Any]:
    return {"$ref": rng.choice(("#/$defs/node", "#/$defs/tree", "#/$defs/plain"))}
