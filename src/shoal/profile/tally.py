"""Where the time of some steps went: filled by the timeline of a GPU or of a processor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.profile.kinds import COMMUNICATION, KINDS, UNACCOUNTED
from shoal.profile.trace import Event

Nanoseconds = float


@dataclass(frozen=True)
class Call:
    """One kernel, or on a processor one operator without those inside it."""

    name: str
    kind: str
    ns: Nanoseconds
    operator: Event | None  # whose shapes say how much there was to do
    leads: bool = True  # of the kernels of one operator, the longest: the operator's work is counted with it


@dataclass
class Tally:
    """All of it in nanoseconds of the traced steps together."""

    begin: int
    end: int
    steps: int
    spent: dict[str, dict[str, Nanoseconds]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    hidden: dict[str, Nanoseconds] = field(default_factory=lambda: defaultdict(float))  # while something computes
    idle: dict[str, Nanoseconds] = field(default_factory=lambda: defaultdict(float))  # by why
    unknown: dict[str, Nanoseconds] = field(default_factory=lambda: defaultdict(float))  # by name
    waits: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # calls in which the host waits for the GPU
    calls: list[Call] = field(default_factory=list)

    def spend(self, kind: str, phase: str | None, ns: Nanoseconds, name: str) -> None:
        by_phase = self.spent[kind]
        by_phase[phase or "outside"] = by_phase.get(phase or "outside", 0.0) + ns
        if kind == UNACCOUNTED:
            self.unknown[name] += ns

    def hide(self, kind: str, ns: Nanoseconds) -> None:
        self.hidden[kind] += ns

    @property
    def totals(self) -> Mapping[str, Nanoseconds]:
        return {kind: sum(by_phase.values()) for kind, by_phase in self.spent.items()}

    @property
    def hidden_communication(self) -> Nanoseconds:
        return self.hidden.get(COMMUNICATION, 0.0)
