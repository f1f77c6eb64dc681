"""The sizes of a mesh with nothing left open, and how ranks are numbered over it. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.spec.run import Mesh


@dataclass(frozen=True)
class Sizes:
    """World = pp x dp_replicate x dp_shard x cp x tp, outermost first: the axes that talk most are neighbours.

    Experts are no axis of their own: `ep` is laid over the ranks of dp_shard x cp x tp, which all hold other tokens.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @staticmethod
    def of(mesh: Mesh) -> Sizes:
        return Sizes(*(int(getattr(mesh, name)) for name in Sizes.__dataclass_fields__))

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Processes that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 carries the gradients. DDP knows no DTensors, so it serves alone or not at all."""
        readers = self.dp * self.cp
        return self.dp_shard * self.cp > 1 or 1 < readers < self.world

    @property
    def reduces_by_micro_batch(self) -> bool:
        """Whether `mesh.reduce` has a meaning: a pipeline's gradients travel once a step, DDP's stay whole."""
        return self.fsdp and self.pp == 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands: its index along pp, dp (replicate and shard together), cp and tp."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}

    @property
    def span(self) -> int:
        """Processes of one copy and stage, which all hold other tokens: what experts are shared over."""
        return self.dp_shard * self.cp * self.tp


ONLY_FSDP_SCATTERS = (
    "mesh.reduce micro_batch is for FSDP without a pipeline (mesh.dp_shard or mesh.cp above 1, mesh.pp 1): elsewhere "
    "gradients stay whole in any case; leave it out, or raise mesh.dp_shard."
)


@dataclass(frozen=True)
class Layout:
    """A mesh with nothing left open but what has no meaning on it: a schedule without a pipeline, for one."""

    sizes: Sizes = Sizes()
    micro_batch: int = 1
    schedule: str = "auto"
    cp_method: str = "auto"
    reduce: str = "auto"  # but `micro_batch`: once a step

    @staticmethod
    def of(mesh: Mesh) -> Layout:
        """Of a mesh with nothing left open."""
        return Layout(Sizes.of(mesh), int(mesh.micro_batch), mesh.schedule, mesh.cp_method, mesh.reduce)


def divisors(n: int) -> list[int]:
    """All of them for any number that a mesh can have; beyond 2^32 some are left out rather than searched for."""
    small = [d for d in range(1, min(math.isqrt(n), 1 << 16) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
