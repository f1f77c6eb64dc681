"""Whether the ledger of a run accounts for all of its time, by a clock that the run knows nothing of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.journal.journal import Record
from shoal.observe.time_ledger import Ledger, ledger

MOST_OFF = 0.01


@dataclass(frozen=True)
class Account:
    ledger: Ledger
    wall_s: float  # from when the run was started first to its end

    @classmethod
    def of(cls, records: Sequence[Record], wall_s: float | None = None) -> Account:
        """Without a clock of one's own, by the first and the last record."""
        if wall_s is None:
            wall_s = max(float(r["t"]) for r in records) - float(records[0].get("began") or records[0]["t"])
        return cls(ledger(records), wall_s)

    @property
    def parts_s(self) -> float:
        return sum(self.ledger.parts_us.values()) / 1e6

    @property
    def between_s(self) -> float:
        """Nobody was running: a scheduler's time, and no part of the ledger."""
        return self.ledger.between_us / 1e6

    @property
    def off_s(self) -> float:
        return self.parts_s + self.between_s - self.wall_s

    @property
    def off(self) -> float:
        return abs(self.off_s) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def right(self) -> bool:
        return abs(self.off_s) <= MOST_OFF * self.wall_s

    def as_json(self) -> dict[str, Any]:
        return {
            "right": self.right,
            "off": self.off,
            "wall_s": self.wall_s,
            "parts_s": {part: us / 1e6 for part, us in self.ledger.parts_us.items()},
            "between_s": self.between_s,
        }
