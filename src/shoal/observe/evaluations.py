"""An `eval` record as people read it: the loss, and where there are several sets, that of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal import readable

MOST_NAMED = 4  # sets in a line; more are in a table


def sentence(record: Mapping[str, Any]) -> str:
    """`3.2104 (web 3.1022, code 3.5349) in fp8`."""
    sets = list(record.get("sets") or ())
    each = ", ".join(f"{one['name']} {readable.number(one['loss'])}" for one in sets)
    more = f" ({each})" if sets and len(sets) <= MOST_NAMED else f" ({len(sets)} sets)" if sets else ""
    return f"{readable.number(record.get('loss'))}{more}{precision(record)}"


def precision(record: Mapping[str, Any]) -> str:
    """Said where it is not what a model is used in."""
    return " in fp8" if record.get("precision") == "fp8" else ""


def table(record: Mapping[str, Any]) -> list[str]:
    """A line for each set, with its share of the mean; none where there is one set."""
    sets = list(record.get("sets") or ())
    whole = sum(float(one["weight"]) for one in sets)
    wide = max((len(str(one["name"])) for one in sets), default=0)
    return [
        f"{one['name']!s:<{wide}}  {readable.number(one['loss'])}  "
        f"({readable.percent(float(one['weight']) / whole)} of the mean, {readable.count(one['targets'])} targets)"
        for one in sets
    ]
