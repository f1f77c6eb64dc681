"""Changes JSON values the way that careless and hostile writers do: types, edges, fields, lengths, depth.

Only the way down to the change is copied, so that a case of a large sample costs as little as one of a small one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

_DEEP, _DEEPER, _DOUBLE = (
    "@deep@",
    "@deeper@",
    "@double@",
)  # become text that no value can be: many brackets, a key twice

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 255, 256, 257, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64),
    *(-(2**31), -(2**62), -(2**63), 10**19, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.0, 257.0, -1.5, 1e15, 1e16, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
)
TEXTS = (
    *(
        "",
        "0",
        "1",
        "-1",
        "x",
        "é",
        "null",
        "NaN",
        "\x00",
        "a\x00b",
        ".",
        "..",
        "../../x",
        "/",
        "/etc/passwd",
        "a/../b",
    ),
    *("\ud800", "\udcff", "x" * 5000, " ", "\n", "\u2028", "1e400", "9" * 30, "%s%n", "{}", "-", "a,b", "\U0001f41f"),
)
MOST_BYTES = 8 << 20  # of a case: three changes that each make a thousand of one are more than any machine has
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [None], [[]], [[[[1]]]], {"": None}, {"a": {}}, _DEEP)


def edge(rng: Random) -> Any:
    roll = rng.random()
    if roll < 0.0003:  # rare, because it takes as long as a thousand other cases
        return _DEEPER
    return rng.choice(NUMBERS if roll < 0.5 else TEXTS if roll < 0.75 else OTHERS)


def mutated(rng: Random, value: Any, most: int = 3) -> Any:
    """The value with one to `most` changes; most cases have one."""
    value = _changed(rng, value)
    while most > 1 and rng.random() < 0.3:
        value = _changed(rng, value)
        most -= 1
    return value


def encoded(value: Any) -> bytes:
    """As JSON text, with what no value can be."""
    return finished(json.dumps(value).encode())


def finished(text: bytes) -> bytes:
    if b"@" in text:
        deep = b'"%b"' % _DEEP.encode()
        text = text.replace(deep, b"[" * 1500 + b"]" * 1500, 1000).replace(deep, b"[]")
        deeper = b'"%b"' % _DEEPER.encode()
        text = text.replace(deeper, b"[" * 100_000 + b"]" * 100_000, 1).replace(
            deeper, b"[]"
        )  # once: it may stand in a list
        text = text.replace(_DOUBLE.encode(), b"")
    return text


def _changed(rng: Random, value: Any) -> Any:
    if isinstance(value, dict) and value:
        if rng.random() < 0.8:
            key = rng.choice(tuple(value))
            return {**value, key: _changed(rng, value[key])}
        return rng.choice(_OF_OBJECTS)(rng, dict(value))
    if isinstance(value, list | tuple) and value:
        if rng.random() < 0.75:
            at = rng.randrange(len(value))
            return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
        return rng.choice(_OF_LISTS)(rng, list(value))
    if type(value) is int and rng.random() < 0.4:
        near = (value + 1, value - 1, -value, value * 2, str(value), bool(value), [value])
        return rng.choice((*near, float(value)) if abs(value) < 2**63 else near)
    if type(value) is str and rng.random() < 0.4:
        at = rng.randrange(len(value) + 1)
        return rng.choice(
            (value[:at], value[at:], value + value, value.upper(), value[:at] + "\x00" + value[at:], [value])
        )
    return edge(rng)


def _dropped(rng: Random, value: dict[str, Any]) -> Any:
    del value[rng.choice(tuple(value))]
    return value


def _added(rng: Random, value: dict[str, Any]) -> Any:
    value[rng.choice(TEXTS)] = edge(rng)
    return value


def _doubled(rng: Random, value: dict[str, Any]) -> Any:
    value[_DOUBLE + rng.choice(tuple(value))] = edge(rng)
    return value


def _renamed(rng: Random, value: dict[str, Any]) -> Any:
    key = rng.choice(tuple(value))
    value[rng.choice((key.upper(), key + "s", key[:-1], *TEXTS)) if isinstance(key, str) else "x"] = value.pop(key)
    return value


def _swapped(rng: Random, value: dict[str, Any]) -> Any:
    a, b = rng.choice(tuple(value)), rng.choice(tuple(value))
    value[a], value[b] = value[b], value[a]
    return value


def _nested(rng: Random, value: dict[str, Any]) -> Any:
    key = rng.choice(tuple(value))
    value[key] = rng.choice(([value[key]], {key: value[key]}, dict(value)))
    return value


def _many(rng: Random, value: dict[str, Any]) -> Any:
    like = rng.choice(tuple(value.values()))
    return {**value, **{f"k{i}": like for i in range(_fitting(rng.choice((10, 300)), like))}}


def _replaced(rng: Random, value: Any) -> Any:
    return edge(rng)


_OF_OBJECTS: tuple[Callable[[Random, dict[str, Any]], Any], ...] = (
    *(_dropped, _dropped, _dropped, _added, _doubled, _renamed, _swapped, _swapped, _nested, _many, _replaced),
)


def _short(rng: Random, value: list[Any]) -> Any:
    del value[rng.randrange(len(value))]
    return value


def _longer(rng: Random, value: list[Any]) -> Any:
    value.insert(rng.randrange(len(value) + 1), rng.choice((edge(rng), rng.choice(value))))
    return value


def _much_longer(rng: Random, value: list[Any]) -> Any:
    return value * _fitting(rng.choice((2, 3, 100, 1000)), value) if len(value) < 50 else value


def _fitting(times: int, value: Any) -> int:
    """So many times, or as often as fits."""
    return min(times, max(1, MOST_BYTES // len(json.dumps(value))))


def _reversed(rng: Random, value: list[Any]) -> Any:
    return value[::-1]


def _shuffled(rng: Random, value: list[Any]) -> Any:
    a, b = rng.randrange(len(value)), rng.randrange(len(value))
    value[a], value[b] = value[b], value[a]
    return value


def _wrapped(rng: Random, value: list[Any]) -> Any:
    return rng.choice(([value], {"0": value}, [], value[0]))


_OF_LISTS: tuple[Callable[[Random, list[Any]], Any], ...] = (
    *(_short, _short, _longer, _longer, _much_longer, _reversed, _shuffled, _wrapped, _replaced),
)
