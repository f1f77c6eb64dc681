"""The kinds of mixer: the half of a block in which a token learns of those before it. No torch.

A kind is one module here, with what the planner, the mesh rules and the exports ask about it, and one in `shoal.model`
that computes it. `weights` is the one list of its parameters: how many there are, which of them multiply every token,
and what tensor parallelism cuts all follow from it. docs/guide/models.md says how to add one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from shoal.spec.mixers import attention, mamba, mla
from shoal.spec.mixers.weight import Weight

if TYPE_CHECKING:
    from shoal.spec.shape import Shape


class Kind(Protocol):
    """What such a module has."""

    SHARES_SEQUENCES: bool  # whether processes may hold a part of a sequence each (`mesh.cp`)
    IN_8_BITS: bool  # whether its products can be (`train.precision: fp8`)

    def weights(self, shape: Shape) -> list[Weight]:
        """Every parameter, in the order of the module's own."""

    def flops_per_pair(self, shape: Shape) -> int:
        """Training FLOPs of one token and one that it sees."""

    def flops_per_token(self, shape: Shape) -> int:
        """Training FLOPs of one token, whatever it sees, beside the products with weights."""

    def gathered(self, shape: Shape) -> tuple[int, ...]:
        """Numbers a token of each thing that tensor parallelism gathers for its products."""

    def widths(self, shape: Shape) -> dict[str, int]:
        """What tensor parallelism deals out, by the names in the run file: each must divide."""


KINDS: dict[str, Kind] = {"attention": attention, "mamba": mamba, "mla": mla}


def widest_tp(shape: Shape) -> int:
    """What every size of `mesh.tp` divides, by the mixers."""
    return math.gcd(*(width for kind in shape.mixers for width in KINDS[kind].widths(shape).values()))
