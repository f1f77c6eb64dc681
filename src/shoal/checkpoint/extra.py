"""What a checkpoint says beside its tensors, as far as readers reckon with it: the right types, or it is damaged.

Other names are let through as they are: whoever saves may say more. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal import values

MOST_SKIPS = 100_000
MOST_SOURCES = 100_000
MOST_STAGES = 1000


def _span(said: object) -> list[int]:
    first, last = pair if len(pair := values.each(values.whole, 2)(said)) == 2 else (1, 0)
    if first > last:
        raise values.BadValue("no first and last batch")
    return [first, last]


def stage_of(said: object) -> tuple[int, int]:
    """Which stage of how many, of a model cut over peers; counted from 1."""
    fields = values.fields_of(said)
    of = values.field(fields, "of", lambda n: values.whole(n, MOST_STAGES, 1))
    return values.field(fields, "number", lambda n: values.whole(n, of, 1)), of


_READ: dict[str, Callable[[Any], Any]] = {
    "step": values.whole,
    "position": values.whole,
    "batch": values.whole,
    "skips": values.each(_span, MOST_SKIPS),
    "data": values.each(values.short, MOST_SOURCES),
    "data_sums": values.each(values.short, MOST_SOURCES),
    "eval_loss": values.maybe(values.real),
    "spec": values.fields_of,
    "environment": values.fields_of,
    "imported": values.fields_of,
    "stage": stage_of,
}


def extra_of(said: object) -> dict[str, Any]:
    """`BadValue`, with the place, where it cannot be."""
    found = values.looked_at(said)
    for name, read in _READ.items():
        if name in found:
            values.field(found, name, read)
    return found
