"""The part of JSON Schema draft 7 that the run file's schema uses, enough to ask what an editor would accept."""

from __future__ import annotations

import re
from typing import Any

_KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip
_KNOWN = {
    "$schema", "$defs", "$ref", "allOf", "anyOf", "type", "enum", "const", "properties", "required", "items",
    "additionalProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "title", "description", "default",
}  # fmt: skip


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any] | None = None) -> bool:
    root = root or schema
    assert set(schema) <= _KNOWN, f"{set(schema) - _KNOWN} is not draft 7 as it is read here"
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)
    if not all(accepts(part, value, root) for part in schema.get("allOf", [])):
        return False
    if "anyOf" in schema and not any(accepts(part, value, root) for part in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    kind = schema.get("type")
    if kind and not (isinstance(value, _KINDS[kind]) and (kind == "boolean") == isinstance(value, bool)):
        return False
    return _within(schema, value) and _inside(schema, value, root)


def _within(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, str):
        long = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return long and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, int | float):
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        )
    return True


def _inside(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if isinstance(value, list):
        size = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return size and all(accepts(schema.get("items", {}), item, root) for item in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if not set(schema.get("required", [])) <= set(value):
            return False
        if schema.get("additionalProperties") is False and not set(value) <= set(known):
            return False
        return all(accepts(known[key], item, root) for key, item in value.items() if key in known)
    return True
