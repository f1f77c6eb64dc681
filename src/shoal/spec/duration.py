"""A time as a person writes it: "30 s", "10 min", "1.5 h". Equal lengths have one spelling, so that they are equal."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

# The first is the one that is written back; the others are what people type.
_UNITS = {
    "s": (1.0, ("s", "sec", "secs", "second", "seconds")),
    "min": (60.0, ("min", "m", "mins", "minute", "minutes")),
    "h": (3600.0, ("h", "hr", "hrs", "hour", "hours")),
    "d": (86400.0, ("d", "day", "days")),
}
_SECONDS = {word: seconds for seconds, words in _UNITS.values() for word in words}
# Nothing but ASCII and no flags: the JSON schema carries it too, for the editors.
PATTERN = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(_SECONDS)})$"
LONGEST_S = 366 * 86400.0


def seconds(text: str) -> float:
    """The length of "10 min" in seconds, to the millisecond; ValueError for what is no time or none at all."""
    found = re.fullmatch(r"([0-9.]+) ?([a-z]+)", text)
    if not found or not re.search(PATTERN, text):
        raise ValueError(f"'{text}' is no time")
    length = round(float(found[1]) * _SECONDS[found[2]], 3)
    if not 0 < length <= LONGEST_S:
        raise ValueError(f"'{text}' is not above 0 s, or longer than a year")
    return length


def written(length_s: float) -> str:
    """In the largest unit that makes it a whole number: 5400 is "90 min", 0.5 is "0.5 s"."""
    for unit, (size, _) in reversed(_UNITS.items()):
        if length_s % size == 0:
            return f"{length_s / size:.0f} {unit}"
    return f"{length_s:.3f}".rstrip("0") + " s"


Duration = Annotated[str, Field(pattern=PATTERN), AfterValidator(lambda text: written(seconds(text)))]
