"""One parameter of a mixer, as counts, traffic and sharding see it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    name: str  # inside the mixer
    dims: tuple[int, ...]
    cut: int | None = None  # the dimension that tensor parallelism deals out; None: every process holds it whole
    summed: bool = False  # held whole, and each process of `tp` has a part of its gradient
    product: bool = False  # every token is multiplied with it: 6 FLOPs a number, forwards and backwards

    @property
    def numbers(self) -> int:
        return math.prod(self.dims)

    def local(self, tp: int) -> tuple[int, ...]:
        """Its dimensions on one of `tp` processes."""
        return tuple(n // tp if i == self.cut else n for i, n in enumerate(self.dims))


def linear(name: str, out: int, inside: int, cut: int | None, bias: bool = False) -> list[Weight]:
    """A matrix that turns `inside` numbers into `out`. A bias lies along `out`: cut where the rows are."""
    found = [Weight(f"{name}.weight", (out, inside), cut, product=True)]
    return [*found, Weight(f"{name}.bias", (out,), 0 if cut == 0 else None)] if bias else found
