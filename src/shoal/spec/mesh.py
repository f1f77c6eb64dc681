"""The sizes of a mesh with nothing left open, and how ranks are numbered over it. No torch."""

from __future__ import annotations

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

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands: its index along pp, dp (replicate and shard together), cp and tp."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
