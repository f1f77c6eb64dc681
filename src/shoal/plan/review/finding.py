"""One thing that a review found: how bad it is, a sentence with the run's own numbers, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

# Of a step: a plan is off by a few percent, so less than the one is not said, and less than the other does not hurt.
WORTH, HURTS = 0.03, 0.05


class Severity(IntEnum):
    """The worst first."""

    REFUSED = 0
    HURTS = 1
    NOTE = 2

    @property
    def words(self) -> str:
        return ("will be refused", "will hurt", "good to know")[self]


@dataclass(frozen=True)
class Finding:
    severity: Severity
    rule: str  # its name, the same for every run
    keys: tuple[str, ...]  # of the run file
    what: str  # sentences
    change: str  # a sentence
    share: float | None = None  # of a step's time that it costs, where the planner has a price
    devices: int = 0  # that it was found on
    code: int = 0  # what the verb exits with: of what is refused

    def as_json(self) -> dict[str, Any]:
        return {
            "severity": self.severity.words,
            "rule": self.rule,
            "keys": list(self.keys),
            "what": self.what,
            "change": self.change,
            "share_of_a_step": self.share,
            "devices": self.devices,
        }


def costing(share: float) -> Severity | None:
    """How bad it is to lose so much of a step; None: not worth a sentence."""
    return Severity.HURTS if share >= HURTS else Severity.NOTE if share >= WORTH else None


def traffic_costing(share: float, named: bool) -> Severity | None:
    """The same of what an axis costs: where the planner chose it nothing is faster, so a little is not said."""
    severity = costing(share)
    return severity if named or severity is Severity.HURTS else None


def order(finding: Finding) -> tuple[int, float]:
    """What hurts most comes first; what has no price comes after what has."""
    return finding.severity, -(finding.share or 0.0)


def faster(gain: float) -> str:
    return f"{percent(gain)} faster" if gain < 1 else f"{1 + gain:.1f} times as fast"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"
