"""The process groups of a mesh: one for each axis that has several members, and nothing that nobody uses.

Its members alone make it. On GPUs it is split from the communicator of all processes, which joining has made
(`device_id`), and has no gloo beside it. What a process holds is then a function of its axes, not of how many processes
there are (docs/decisions/054).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Groups:
    """Of one process that has joined. Its calls are collective: all processes make the same, in the same order."""

    rank: int
    world: int
    device: torch.device
    _alone: dist.ProcessGroup | None = field(default=None, init=False)

    def axis(self, name: str, size: int, stride: int) -> dist.ProcessGroup:
        """A group of its own, even over ranks that another one has: exchanges of two axes must not queue up behind each
        other, and somebody asks who sent what (`shoal.parallel.count`)."""
        # NCCL alone on GPUs: all numbers of an axis are there. Every process makes one group of the axis, at the same
        # time, so that together they are one split of the communicator of all.
        backend = "nccl" if self.device.type == "cuda" else None
        mine = line(self.rank, size, stride)
        group = dist.new_group(mine, backend=backend, group_desc=f"mesh_{name}", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # this process is one of its members
        return group

    def mesh(self, sizes: Mapping[str, int], known: Mapping[str, dist.ProcessGroup] | None = None) -> DeviceMesh:
        """Outermost axis first. `known` axes have a group already."""
        groups, stride = [], math.prod(sizes.values())
        assert stride == self.world
        for name, size in sizes.items():
            stride //= size
            if known and name in known:
                groups.append(known[name])
            else:
                groups.append(self.axis(name, size, stride) if size > 1 else self.alone)
        ranks = torch.arange(self.world, dtype=torch.int).view(*sizes.values())
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=tuple(sizes))

    @property
    def alone(self) -> dist.ProcessGroup:
        """This process by itself: a mesh wants a group for axes of one as well, and one does for all of them."""
        if self._alone is None:
            self._alone = self.axis("alone", 1, 1)
        return self._alone


def line(rank: int, size: int, stride: int) -> list[int]:
    """The ranks that differ from this one along an axis alone: so many, so far apart."""
    first = rank - rank // stride % size * stride
    return [first + i * stride for i in range(size)]
