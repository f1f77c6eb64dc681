"""What NCCL's flight recorder knows of this process's collectives, cut down to what says who has not come where.

torch keeps a ring of the last collectives of all groups (TORCH_FR_BUFFER_SIZE) and gives it as JSON, without pickles
and without stacks; the call asks the device's events and waits for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shoal.parallel.count import axes
from shoal.parallel.place import Place

KEPT = 8  # of each group, the newest
FIELDS = ("collective_seq_id", "p2p_seq_id", "is_p2p", "profiling_name", "state", "input_sizes", "input_dtypes")


def flight_of(place: Place) -> Callable[[], dict[str, Any]] | None:
    """To be asked from another thread at any time; None where no NCCL is."""
    if place.device.type != "cuda" or not dist.is_available() or not dist.is_nccl_available():
        return None
    names = axes(place)

    def look() -> dict[str, Any]:
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]  # not in its stubs

        return cut_down(json.loads(_dump_nccl_trace_json()), names)

    return look


def cut_down(dump: dict[str, Any], axis_of: dict[str, str]) -> dict[str, Any]:
    """`dump` is as torch writes it (its version 2.x); groups are named by their axis, where they have one."""
    groups: dict[str, dict[str, Any]] = {}
    for name, about in _table(dump.get("pg_config")).items():
        axis = axis_of.get(name) or str(_table(about).get("desc", ""))
        groups[name] = {"axis": axis, "ranks": _numbers(_table(about).get("ranks", "")), "collectives": []}
    entries = dump.get("entries")
    for entry in entries if isinstance(entries, list) else ():
        group = _table(entry).get("process_group")
        if isinstance(group, list | tuple) and group and (name := str(group[0])) in groups:
            groups[name]["collectives"].append({field: entry[field] for field in FIELDS if field in entry})
    for about in groups.values():
        about["collectives"] = about["collectives"][-KEPT:]
    return {"version": dump.get("version", ""), "nccl": dump.get("comm_lib_version", ""), "groups": groups}


def _numbers(text: Any) -> list[int]:
    """Of `[0, 1, 2]`, which is a text in the dump."""
    parts = [part.strip() for part in str(text).strip("[] ").split(",")]
    return [int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) < 10]


def _table(said: Any) -> dict[str, Any]:
    """Of another version of torch: what has another form is not said."""
    return said if isinstance(said, dict) else {}
