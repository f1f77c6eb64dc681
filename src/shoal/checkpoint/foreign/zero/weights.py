"""The tensors of a checkpoint that DeepSpeed has saved, by their names: weights in float32, and AdamW's moments.

What the files say is compared with each other before anything is read: processes, shapes, lengths. Of their pickles
only tensors, names and a few numbers are looked at, so that it does not matter what else lies in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.checkpoint.foreign.incoming import Incoming
from shoal.checkpoint.foreign.inert import Refused
from shoal.checkpoint.foreign.zero.flat import Cut, Joined, in_a_row, in_parts, incoming, spread
from shoal.checkpoint.foreign.zero.module import Module, read_module
from shoal.checkpoint.foreign.zero.ranks import MOMENTS, Rank, read_rank
from shoal.checkpoint.foreign.zero.state_file import Numbers, about
from shoal.checkpoint.foreign.zero.tag import Tag
from shoal.checkpoint.layout import TORCH_DTYPES
from shoal.checkpoint.rows import ITEM_BYTES
from shoal.values import shown

NO_PICKLE = "its files are pickles: they were read for their numbers alone, and nothing in them was run."
_MOST_TIMES = 64  # tensors may share their bytes; beyond, a small file would fill a disk


@dataclass
class Taken:
    """What a folder holds, in DeepSpeed's names."""

    tensors: dict[str, Incoming] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def of_zero(tag: Tag) -> Taken:
    """Of a folder as `engine.save_checkpoint` writes it."""
    module = read_module(tag)
    ranks = [read_rank(file, len(tag.optim), tag.each_has_a_part) for file in tag.optim]
    taken = Taken(counters=module.counters)
    shapes = module.shapes
    with about(tag.folder):
        for name, numbers in _of_groups(module, ranks, [rank.rows for rank in ranks]).items():
            taken.tensors[name] = incoming(shapes[name], numbers)
        add_others(module, tag.each_has_a_part, taken)
        if all(rank.moments is not None for rank in ranks):
            for key in MOMENTS:
                rows = [_moments_of(rank, key) for rank in ranks]
                for name, numbers in _of_groups(module, ranks, rows).items():
                    taken.tensors[moment(name, key)] = incoming(shapes[name], numbers)
        else:
            taken.notes.append("its optimizer's state is left out: it is not AdamW's, or not there on every process.")
        check_budget(taken, module.bytes + sum(rank.bytes for rank in ranks))
    return taken


def moment(name: str, key: str) -> str:
    """As an optimizer's state is called in a flat state dict (`foreign_names`)."""
    return f"optimizer.state.{name}.{key}"


def add_others(module: Module, cut: bool, taken: Taken) -> None:
    """What is not in the flat groups. `cut`: frozen tensors are in parts, one in each file of the model."""
    tensors = taken.tensors
    for name, shape in module.frozen.items():
        if name not in tensors:
            parts = [pieces[name] for pieces in module.pieces]
            tensors[name] = incoming(shape, spread(name, shape, parts) if cut else parts[0])
    lost = [f"{shown(name)} (no tensor)" for name in module.no_tensors]
    for name, stored in module.others.items():
        if name in tensors or name in module.shared:
            continue
        if not TORCH_DTYPES[stored.dtype].is_floating_point:
            lost.append(f"{shown(name)} ({stored.dtype})")
            continue
        tensors[name] = incoming(stored.shape, stored, "F32" if name in module.buffers else None)
    for name, of in module.shared.items():
        if name in tensors:
            continue
        if of in tensors:
            tensors[name] = tensors[of]
        else:
            lost.append(f"{shown(name)} (another name of {shown(of)}, which is not there)")
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        taken.notes.append(f"left out, as no weights: {', '.join(lost[:3])}{more}.")


def check_budget(taken: Taken, read_bytes: int) -> None:
    total = sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in taken.tensors.values())
    if total > _MOST_TIMES * read_bytes:
        raise Refused(f"its tensors would be {total:,} bytes, out of files of {read_bytes:,}")


def _of_groups(module: Module, ranks: Sequence[Rank], rows: Sequence[Sequence[Numbers]]) -> dict[str, Numbers]:
    """Each trained tensor, out of the rows that each process has of each group."""
    if len({len(row) for row in rows}) != 1:
        raise Refused("its processes have different numbers of flat groups")
    if ranks[0].in_parts:
        return {**in_parts({n: s for group in module.groups for n, s in group.items()}, [Joined(row) for row in rows])}
    paddings = ranks[0].paddings or [[0] * len(group) for group in module.groups]
    if [len(group) for group in module.groups] != [len(padding) for padding in paddings] or len(rows[0]) != len(
        paddings
    ):
        raise Refused(
            f"it has shapes of {len(module.groups)} groups, and {len(rows[0])} flat groups, or not their paddings"
        )
    found: dict[str, Numbers] = {}
    for group, padding, row in zip(module.groups, paddings, zip(*rows, strict=True), strict=True):
        found |= in_a_row(group, padding, Joined(row), len(ranks))
    return found


def _moments_of(rank: Rank, key: str) -> list[Numbers]:
    assert rank.moments is not None
    return [Cut(both[key], 0, row.count) for both, row in zip(rank.moments, rank.rows, strict=True)]
