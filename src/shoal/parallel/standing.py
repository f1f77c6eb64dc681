"""How far this process is in each of its groups: the number of collectives that it has begun there.

Two members of a group that wait for each other differ by who has not begun the collective that the other waits in. The
groups count by themselves, so this costs nothing until somebody looks (docs/decisions/023).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shoal.parallel.count import axes
from shoal.parallel.place import Place


def standing(place: Place) -> Callable[[], dict[str, int]]:
    """Asked from another thread at any time; a group is named by its axis, its number and its members."""
    names = axes(place)

    def look() -> dict[str, int]:
        if not dist.is_initialized():
            return {}
        found = {}
        for group in list(c10d._world.pg_map):
            if group.size() > 1:
                axis = names.get(group.group_name) or group.group_desc
                # A pipeline's messages are counted too (gloo) and differ from stage to stage: not to be compared.
                members = [place.rank] if "pp" in axis.split("=") else dist.get_process_group_ranks(group)
                name = f"{axis}/{group.group_name}/{zlib.crc32(str(members).encode()):08x}"
                found[name] = sum(map(_begun, (group._get_backend(device) for device in group._device_types)))
        return found

    return look


def _begun(backend: Any) -> int:
    return int(backend._get_sequence_number_for_group())  # torch's stubs do not know it
