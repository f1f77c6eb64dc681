"""What a peer has done of the running step: what it computed, what it sent and to whom, what it has summed."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.net.api import PeerId
from shoal.stages.pending import Share
from shoal.stages.report import Measured
from shoal.stages.routes import TRAIN, When

Sent = tuple[str, int]  # "act" or "grad", and the micro-batch


@dataclass
class Step:
    """What this peer has done of the running step."""

    era: int
    number: int
    phase: int = TRAIN
    forwarded: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    sent: dict[Sent, bytes] = field(default_factory=dict)
    sent_to: dict[Sent, PeerId] = field(default_factory=dict)
    part: tuple[list[int], bytes] | None = None
    part_to: set[PeerId] = field(default_factory=set)
    square: float = 0.0
    loss: float = 0.0
    digest: str = ""  # of the state before it; empty until there is a sum
    summed: list[Share] | None = None  # what the sum was made of
    compute_s: float = 0.0
    measured: dict[int, Measured] = field(default_factory=dict)  # of held-out data, by micro-batch

    @property
    def when(self) -> When:
        return self.era, self.number, self.phase

    @property
    def about(self) -> dict[str, int]:
        """Of its messages."""
        return {"era": self.era, "step": self.number, "phase": self.phase}
