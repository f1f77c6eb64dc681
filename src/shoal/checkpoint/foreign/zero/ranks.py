"""What one process has of the flat groups: the weights in float32, and AdamW's moments, which lie like them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.foreign.inert import Refused
from shoal.checkpoint.foreign.zero.state_file import StateFile, Stored, listed, opened, table
from shoal.values import each, whole

MOMENTS = ("exp_avg", "exp_avg_sq")
_OF_1_AND_2, _OF_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_MOST_WORLD = 1 << 20


@dataclass(frozen=True)
class Rank:
    in_parts: bool  # ZeRO 3
    rows: tuple[Stored, ...]  # one for each group
    paddings: list[list[int]] | None  # behind each tensor of a group
    moments: tuple[Mapping[str, Stored], ...] | None  # of each group; None where there are none, or others than AdamW's
    bytes: int


def read_rank(file: Path, world: int, in_parts: bool) -> Rank:
    """The file of one process of so many."""
    with opened(file) as state:
        fields = table(table(state.value, "content").get("optimizer_state_dict"), "optimizer_state_dict")
        if _OF_1_AND_2 not in fields and _OF_3 not in fields:
            raise Refused("it has no weights in float32 (it holds no flat groups of ZeRO's)")
        if (_OF_3 in fields) != in_parts:
            stages = "ZeRO 1 or 2, and the model's files of ZeRO 3" if in_parts else "ZeRO 3, and the model's file not"
            raise Refused(f"it is of {stages}")
        _check_world(fields, world)
        rows = tuple(state.tensor(row) for row in listed(fields[_OF_3 if in_parts else _OF_1_AND_2], "flat groups"))
        if wrong := [row for row in rows if len(row.shape) != 1]:
            raise Refused(f"a flat group has the shape {list(wrong[0].shape)}, which is not flat")
        base = fields.get("optimizer_state_dict" if in_parts else "base_optimizer_state")
        return Rank(in_parts, rows, _paddings(fields), _moments(state, base, rows, in_parts), state.bytes)


def _check_world(fields: Mapping[str, Any], world: int) -> None:
    said = fields.get("partition_count")
    counts = said if isinstance(said, list) else [said]
    groups = fields.get("ds_zero_partition_groups")
    counts = counts + [group.get("partition_count") for group in groups or [] if isinstance(group, dict)]
    if wrong := [count for count in counts if count is not None and count != world]:
        raise Refused(
            f"its groups are cut over {whole(wrong[0], _MOST_WORLD)} processes, and there are files of {world}: copy "
            "those of all nodes into the folder, and none of another checkpoint"
        )


def _paddings(fields: Mapping[str, Any]) -> list[list[int]] | None:
    said = fields.get("param_alignment_paddings")
    return None if said is None else each(each(whole))(said)


def _moments(
    state: StateFile, base: Any, rows: tuple[Stored, ...], in_parts: bool
) -> tuple[Mapping[str, Stored], ...] | None:
    """Of every group, or none. What is no AdamW's is no error: the weights are there all the same."""
    of = base if isinstance(base, list) else base.get("state") if isinstance(base, dict) else None
    found = []
    for group, row in enumerate(rows):
        one = of.get(group) if isinstance(of, dict) else of[group] if isinstance(of, list) and group < len(of) else None
        if not isinstance(one, dict) or any(key not in one for key in MOMENTS):
            return None
        try:
            both = {key: state.tensor(one[key]) for key in MOMENTS}
        except Refused:
            return None
        # With ZeRO 1 and 2 the padding at the end of the row is left out of the weights alone.
        if any(len(m.shape) != 1 or m.count < row.count or (in_parts and m.count > row.count) for m in both.values()):
            return None
        found.append(both)
    return tuple(found)
