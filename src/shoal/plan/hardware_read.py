"""Reads a hardware file: TOML with `[[device]]`, `[[fabric]]` and `[sources]` tables, checked key by key.

Entries stay plain tables here, so that a later file may change one figure of an earlier one (`hardware_build`).
"""

from __future__ import annotations

import math
import re
import tomllib
from typing import Any

from shoal.errors import SpecError
from shoal.near import closest
from shoal.plan.hardware_types import LINK_KINDS, PRECISIONS
from shoal.values import shown

Table = dict[str, Any]

DATE = re.compile(r"20\d\d(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")

# Kinds of values: a type, a tuple of choices, a list of one kind, a table of known keys, or one of these words.
_DATE, _TEXTS, _SOURCES = "date", "texts", "sources"
_RATES = dict.fromkeys(PRECISIONS, float)
_ROWS = [list]
_LINK = {
    "kind": tuple(LINK_KINDS),
    "gbs": float,
    "domain": int,
    "per_peer_gbs": float,
    "in_switch": bool,
    "latency_us": float,
    "achievable": float,
}
_MEASURED = {
    "matmul": _ROWS,
    "attention": _ROWS,
    "memory": _ROWS,
    "collectives": _ROWS,
    "disk": _ROWS,
    "norm": _ROWS,
    "launch_us": float,
    "when": str,
    "software": str,
}
_DEVICE = {
    "name": str,
    "like": str,
    "aliases": [str],
    "vendor": str,
    "released": int,
    "architecture": float,
    "peak": _RATES,
    "matmul": _RATES,
    "memory_gb": float,
    "bandwidth_tbs": float,
    "units": int,
    "link": _LINK,
    "per_node": int,
    "scale_out": {"fabric": str, "gbs": float},
    "watts": float,
    "prices": [{"usd_per_hour": float, "date": _DATE, "where": str, "basis": ("list", "spot", "median")}],
    "sources": _TEXTS,
    "measured": _MEASURED,
}
_FABRIC = {
    "name": str,
    "aliases": [str],
    "family": str,
    "since": int,
    "gbs": float,
    "per": ("device", "node"),
    "latency_us": float,
    "achievable": float,
    "sources": _TEXTS,
}
_FILE = {"device": [_DEVICE], "fabric": [_FABRIC], "sources": _SOURCES}

_WORDS = {
    float: "a number above 0",
    int: "a whole number above 0",
    str: "text",
    bool: "true or false",
    list: "a list",
    _DATE: 'a date as text ("2026-05-20")',
    _TEXTS: 'a table from a source to the figures that it gave ({ "data sheet, 2026-05" = "peak memory_gb" })',
    _SOURCES: "a table of { text, date }",
}


def read(text: str, where: str) -> Table:
    """The tables of one file, with every key known and every value of its kind."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where} is no TOML: {error}.") from error
    except RecursionError:
        raise SpecError(f"{where} is nested too deeply.") from None
    _check(content, _FILE, where, "")
    for kind in ("device", "fabric"):
        for entry in content.get(kind, []):
            if not entry.get("name", "").strip():
                raise SpecError(f'{where}: a [[{kind}]] has no name; give it one (name = "our box").')
            for price in entry.get("prices", []):
                if not {"usd_per_hour", "date"} <= set(price):
                    raise SpecError(f"{where}: a price of '{entry['name']}' lacks usd_per_hour or date; add it.")
    return content


def _check(value: Any, kind: Any, where: str, path: str) -> None:
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            raise SpecError(f"{where}: {path} must be a table, not {shown(repr(value))}.")
        for name, inner in value.items():
            dotted = f"{path}.{name}" if path else name
            if name not in kind:
                near = closest(name, kind)
                hint = f"did you mean {near}?" if near else f"the keys there are {', '.join(kind)}."
                raise SpecError(f"{where}: there is no key '{dotted}'; {hint}")
            _check(inner, kind[name], where, dotted)
    elif isinstance(kind, list):
        if not isinstance(value, list):
            raise SpecError(f"{where}: {path} must be a list, not {shown(repr(value))}.")
        for item in value:
            named = isinstance(item, dict) and isinstance(item.get("name"), str)
            _check(item, kind[0], where, f"{path} '{item['name']}'" if named else path)
    elif isinstance(kind, tuple):
        if value not in kind:
            raise SpecError(f"{where}: {path} must be one of {', '.join(kind)}, not {shown(repr(value))}.")
    elif not _is(value, kind):
        raise SpecError(f"{where}: {path} must be {_WORDS[kind]}, not {shown(repr(value))}.")


def _is(value: Any, kind: Any) -> bool:
    if kind in (float, int):
        numbers = (int,) if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if kind == _DATE:
        return isinstance(value, str) and bool(DATE.fullmatch(value))
    if kind == _TEXTS:
        return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if kind == _SOURCES:
        told = value.values() if isinstance(value, dict) else [None]
        return all(isinstance(source, dict) and set(source) == {"text", "date"} for source in told)
    return isinstance(value, kind)
