"""What to do with bad input: refuse it, naming the place, or leave it out and count it when asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.data.broken import shown
from shoal.errors import DataError


@dataclass
class Problems:
    """`skip` counts by reason, with the first place of each; otherwise the first problem raises."""

    skip: bool
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def found(self, reason: str, where: Callable[[], str], what: str, advice: str = "correct it") -> None:
        """`where` is a function because counting lines up to a place costs a read of the file."""
        if not self.skip:
            raise DataError(f"{shown(where())} {what}; {advice}, or leave such input out with --skip-bad.")
        if reason not in self.counts:
            self.first[reason] = shown(where())
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def to_json(self) -> dict[str, Any]:
        return {reason: {"count": n, "first": self.first[reason]} for reason, n in sorted(self.counts.items())}

    def add(self, other: dict[str, Any]) -> None:
        """Take in what a later part of the input counted."""
        for reason, entry in other.items():
            self.first.setdefault(reason, entry["first"])
            self.counts[reason] = self.counts.get(reason, 0) + entry["count"]
