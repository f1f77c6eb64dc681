"""A run that is a batch: one command over many units, each of which is done once."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from shoal.spec.base import CountOrAuto, LocalPath, Positive, Says, Strict
from shoal.spec.launch import Duration, Environment
from shoal.spec.script import Words

MOST_UNITS = 10_000_000
MOST_LISTED = 10_000  # items in a run file
MOST_ITEM = 32_768  # characters of one: the system takes 128 KiB in one argument, and an item may stand in it thrice
# What a word of the command may hold: `{index}`, `{index:05}` (with zeros), `{units}`, `{item}`, `{attempt}`.
PLACE = re.compile(r"\{(index|units|item|attempt)(?::(0?\d{1,2}))?\}")
# What Shoal tells each unit, besides what stands in its command.
GIVEN = frozenset(
    ("SHOAL_UNIT", "SHOAL_UNITS", "SHOAL_ITEM", "SHOAL_UNIT_ATTEMPT", "SHOAL_BATCH", "SHOAL_BATCH_RUNNER")
)
PLACES_SAID = "`{index}`, `{index:05}`, `{units}`, `{item}` and `{attempt}`"

Count = Annotated[Positive, Field(le=MOST_UNITS)]
Items = Annotated[LocalPath | Words, Says("a file with one item a line, or a list of items")]


class Batch(Strict):
    """One command over many units, in the place of training: preprocessing, offline inference, evaluations."""

    command: Annotated[Words, Field(min_length=1)] = Field(
        description=f"The program and its arguments, once for each unit; {PLACES_SAID} stand for what they say."
    )
    units: Count | None = Field(None, description="How many units, counted from 0; empty: as many as there are items.")
    items: Items | None = Field(
        None, description="One unit for each: a file with one item a line, or a list; `{item}` is the unit's."
    )
    at_once: CountOrAuto = Field(
        "auto", description="Units at a time on one node; `auto`: one a GPU, else one for each of its cores."
    )
    retries: int = Field(
        3, ge=0, description="How often a unit that failed is tried again, later each time (guard.backoff_s, doubled)."
    )
    timeout: Duration | None = Field(None, description="Of one attempt; then it is ended, and counts as failed.")
    env: Environment = Field({}, description="Environment variables, besides those of the shell.")
    folder: LocalPath | None = Field(None, description="Where it runs; empty: the folder that it was started from.")
    outputs: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="The file that a unit makes, from `batch.folder`: it is done only if that is there."
    )


def filled(word: str, index: int, units: int, item: str | None, attempt: int) -> str:
    """A word of the command for one unit. Other braces (JSON, awk) are left as they are."""
    known: dict[str, int | str] = {"index": index, "units": units, "attempt": attempt, "item": item or ""}

    def one(found: re.Match[str]) -> str:
        value = known[found[1]]
        return str(value) if isinstance(value, str) or not found[2] else format(value, f"{found[2]}d")

    return PLACE.sub(one, word) if "{" in word else word
