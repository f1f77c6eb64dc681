"""What readers say when the bytes of a file cannot be followed any further."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

AGAIN = "fetch or write it again"
TOO_LONG = "cut it, or allow it with --max-document-mb"


class Broken(Exception):
    """The bytes end or go wrong half-way; the message says how, to follow the file's name."""

    def __init__(self, what: str, advice: str = AGAIN, reason: str = "broken file") -> None:
        super().__init__(what)
        self.advice = advice
        self.reason = reason
        """What --skip-bad counts it as."""


@dataclass(frozen=True)
class Unreadable:
    """Stands in a row where a text should be."""

    reason: str
    what: str
    advice: str


def shown(path: object) -> str:
    """A name of others, on one line and with nothing in it that a terminal would act on or cannot print."""
    name = str(path)
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in name)


def some(names: Iterable[object]) -> str:
    """The first of the fields or columns that there are, in a few words whatever they are called."""
    few = [shown(str(name)[:40]) for name in itertools.islice(names, 8)]
    return ", ".join(few) or "none"


def first_line(e: BaseException) -> str:
    """Of what a library says, so much as fits into a sentence of ours."""
    said = (str(e).strip() or type(e).__name__).splitlines()[0].rstrip(".")
    return "".join(c if c.isprintable() else "?" for c in said[:300])
