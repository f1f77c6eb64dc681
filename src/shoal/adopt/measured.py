"""What was measured of a script: one row for each thing that was tried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    name: str  # repeated, resumed, two processes
    same: bool | None  # None: it could not be measured, or there is nothing to be the same
    found: str  # in words
    after: int = 0  # so many steps were the same before it differed

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "same": self.same, "found": self.found}


@dataclass
class Measured:
    rows: list[Row] = field(default_factory=list)

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def as_json(self) -> list[dict[str, Any]]:
        return [row.as_json() for row in self.rows]
