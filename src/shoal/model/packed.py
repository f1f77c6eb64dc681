"""Two matrices in one parameter (gate and up of experts), each of which is cut: a process's part is not one box.

With the parts in the order in which processes hold them it is one again. In what follows `mine` says how.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

MATRICES = 2


def in_parts(whole: Tensor, mine: Tensor) -> Tensor:
    """A whole tensor in the order of parts; as it is where `mine` has not two matrices in one."""
    last = _packed(mine)
    if last is None or not isinstance(mine, DTensor):
        return whole
    parts = mine.device_mesh.size(mine.device_mesh.ndim - 1)
    return whole.unflatten(last.dim, (MATRICES, parts, -1)).transpose(last.dim, last.dim + 1).reshape(whole.shape)


def placements_in_parts(mine: DTensor) -> tuple[Placement, ...]:
    """How a tensor in that order is cut."""
    last = _packed(mine)
    return mine.placements if last is None else (*mine.placements[:-1], Shard(last.dim))


def _packed(mine: Tensor) -> _StridedShard | None:
    # FSDP over tensor parallelism has strided shards too, but never on the last axis of the mesh.
    last = mine.placements[-1] if isinstance(mine, DTensor) else None
    return last if isinstance(last, _StridedShard) else None
