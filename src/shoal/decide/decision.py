"""What Shoal decided by itself, and why: journaled, shown, and decided anew when a run goes on elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    key: str
    value: Any
    why: str


@dataclass
class Choices:
    """Collects decisions: one for each `auto` that is closed."""

    made: list[Decision] = field(default_factory=list)

    def choose(self, key: str, given: Any, value: T, why: str) -> T:
        """What the user gave; `value` where that is `auto`."""
        if given != "auto":
            return given  # of the type of `value`, as the spec has it
        self.made.append(Decision(key, value, why))
        return value
