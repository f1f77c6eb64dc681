"""Numbers and flags of a config.json, each within a range: what is no such thing is `shoal.values.BadValue`.

A field that is left out or null is the default. The ranges are far beyond any model there is, and small enough that
nothing can be built out of them before the weights have been looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal import values
from shoal.values import inside

MOST_WIDE = 1 << 24  # of a layer
MOST_LAYERS = 1 << 14
MOST_HEADS = 1 << 16
MOST_EXPERTS = 1 << 16
MOST_TOKENS = 1 << 32  # of a vocabulary
MOST_POSITIONS = 1 << 48


def whole(config: Mapping[str, Any], key: str, most: int, default: int | None = None, least: int = 1) -> int:
    """Without a default the field must be there."""
    said = config.get(key)
    if said is None and default is not None:
        return default
    with inside(key):
        return values.whole(said, most, least)


def real(config: Mapping[str, Any], key: str, default: float | None = None, least: float = 0.0) -> float:
    said = config.get(key)
    if said is None and default is not None:
        return default
    with inside(key):
        return values.real(said, least=least)


def truth(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A flag that a class asks for without a look at its type: null is not left out, but false."""
    return flag(config, key, default and key not in config)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    said = config.get(key)
    with inside(key):
        return default if said is None else values.flag(said)
