"""How many collectives each group of processes has begun, as torch counts them. Imports no torch: who asks has it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any


def begun(c10d: Any, rank: int, axes: Mapping[str, str]) -> dict[str, int]:
    """`c10d` is `torch.distributed.distributed_c10d`; `axes` names groups by their axis. Asked from another thread at
    any time; a group is named by its axis, its number and its members."""
    if not c10d.is_initialized():
        return {}
    found = {}
    for group in list(c10d._world.pg_map):
        if group.size() > 1:
            axis = axes.get(group.group_name) or group.group_desc
            # A pipeline's messages are counted too (gloo) and differ from stage to stage: not to be compared.
            members = [rank] if "pp" in axis.split("=") else c10d.get_process_group_ranks(group)
            name = f"{axis}/{group.group_name}/{zlib.crc32(str(members).encode()):08x}"
            backends = (group._get_backend(device) for device in group._device_types)
            found[name] = sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    return found
