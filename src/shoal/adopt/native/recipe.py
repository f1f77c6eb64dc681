"""What was read of a script, as values of a run file: each with where it came from, and what is left to ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.adopt.native.values import Known, Values
from shoal.errors import SpecError


class NotNative(SpecError):
    """Shoal's own loop cannot train this; the message is a sentence that names the line."""


def refuse(where: str, what: str) -> NotNative:
    return NotNative(f"{where} {what}, so Shoal cannot train this natively; `shoal run` runs the script as it is.")


@dataclass(frozen=True)
class Entry:
    key: str
    value: Any
    comment: str


@dataclass
class Recipe:
    entries: dict[str, Entry] = field(default_factory=dict)
    questions: dict[str, list[str]] = field(default_factory=dict)  # section or key → what is not known
    prepare: list[str] = field(default_factory=list)  # commands to be given first
    longest: int | None = None  # row that the model takes

    def put(self, key: str, value: Any, comment: str) -> None:
        self.entries[key] = Entry(key, value, comment)

    def known(self, key: str, found: Known, note: str = "") -> None:
        self.put(key, found.value, f"{found.said}{'; ' if note else ''}{note}")

    def ask(self, key: str, question: str) -> None:
        self.questions.setdefault(key, []).append(question)

    def value(self, key: str) -> Any:
        return self.entries[key].value if key in self.entries else None

    def number(
        self, values: Values, key: str, found: Known | None, question: str, least: float = 0.0, note: str = ""
    ) -> float | None:
        """Put where it was read and is a number from `least` on; else asked."""
        value = None if found is None or isinstance(found.value, bool) else found.value
        if found is not None and isinstance(value, int | float) and value >= least:
            self.known(key, found, note)
            return float(value)
        self.ask(key, question)
        return None
