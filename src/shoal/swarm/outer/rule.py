"""How a swarm's outer step is taken: the numbers that all peers must have alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.spec.swarm import Swarm

SPARSE, DENSE = (0.95, 2.5, 0.0), (1.0, 0.8, 0.6)  # feedback, rate and momentum that learned best: decision 038
ALIGN = 4096  # fragments begin at multiples of it, so that no codec's chunk is cut


@dataclass(frozen=True)
class Rule:
    codec: str = "topk"
    chunk: int = 4096
    keep: int = 64
    feedback: float = 0.95  # share of what the codec has left out that is kept for the next part
    fragments: int = 1
    lr: float = 0.7
    momentum: float = 0.0
    robust: bool = True

    @classmethod
    def of(cls, swarm: Swarm) -> Rule:
        usual = SPARSE if swarm.codec == "topk" else DENSE
        asked = (swarm.feedback, swarm.outer_lr, swarm.outer_momentum)
        feedback, lr, momentum = (best if said == "auto" else said for said, best in zip(asked, usual, strict=True))
        return cls(swarm.codec, swarm.chunk, swarm.keep, feedback, swarm.fragments, lr, momentum, swarm.robust)

    def stated(self, swarm: Swarm) -> Swarm:
        """With the numbers in the place of `auto`, which another version may choose otherwise."""
        numbers = {"feedback": self.feedback, "outer_lr": self.lr, "outer_momentum": self.momentum}
        return swarm.model_copy(update=numbers)

    def fragment(self, round: int, count: int) -> slice:
        """The stretch of the weights that a round exchanges. Empty where there are more fragments than weights."""
        unit = ALIGN * max(1, -(-self.chunk // ALIGN))
        units = -(-count // unit)
        k = round % self.fragments
        first, last = units * k // self.fragments, units * (k + 1) // self.fragments
        return slice(first * unit, min(last * unit, count))
