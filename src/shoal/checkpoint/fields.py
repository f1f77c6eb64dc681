"""A layout and a file as JSON, in a manifest and in what a rank says of its own file. No torch here.

What is read back was written by another process, or by nobody who can be trusted: every number has its range.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Sequence
from typing import Any

from shoal.checkpoint.blocks import DIGEST_BYTES, File, file_of
from shoal.checkpoint.grids import Cut, Dims, Grid
from shoal.checkpoint.rows import ITEM_BYTES, Entry, Layout
from shoal.values import MOST_ITEMS, BadValue, fields_of, items, short, whole

MOST = 1 << 53  # of any number in them
MOST_DIMS = 64
MOST_RANKS = 1 << 20
ALIGNED = 8  # a header ends on a multiple of it, so that the numbers in what begins with a block are aligned


def layout_fields(layout: Layout) -> dict[str, Any]:
    grids: dict[int, int] = {}
    listed: list[dict[str, Any]] = []
    tensors: dict[str, Any] = {}
    numbers: dict[Grid, int] = {}
    for name, entry in layout.tensors.items():
        fields: dict[str, Any] = {"dtype": entry.dtype, "shape": entry.shape}
        if entry.grid is not None:
            if id(entry.grid) not in grids:
                if entry.grid not in numbers:
                    numbers[entry.grid] = len(listed)
                    listed.append(_grid_fields(entry.grid))
                grids[id(entry.grid)] = numbers[entry.grid]
            fields["grid"] = grids[id(entry.grid)]
        if entry.boxes is not None:
            fields["boxes"] = entry.boxes
        tensors[name] = fields
    return {
        "piece_bytes": layout.piece_bytes, "block_bytes": layout.block_bytes, "grids": listed, "tensors": tensors,
    }  # fmt: skip


def layout_from(fields: dict[str, Any], world: int) -> Layout:
    """`ValueError`, or what indexing raises, where it cannot be."""
    if not 0 < world <= MOST_RANKS:
        raise BadValue(f"a world of {world} ranks")
    grids = [_grid_from(grid, world) for grid in items(fields["grids"], MOST_ITEMS)]
    tensors = {name: _entry_from(entry, grids) for name, entry in fields_of(fields["tensors"]).items()}
    block_bytes = _whole(fields["block_bytes"], 1)
    if block_bytes % ALIGNED:
        raise BadValue(f"blocks of {block_bytes} bytes, which is no multiple of {ALIGNED}")
    return Layout(tensors, _whole(fields["piece_bytes"], 1), block_bytes)


def file_fields(file: File) -> dict[str, Any]:
    return {
        "bytes": file.bytes,
        "header_bytes": file.header_bytes,
        "header_xxh3_128": file.header_xxh3_128,
        "blocks": base64.b64encode(file.digests).decode(),
    }


def file_from(fields: dict[str, Any], block_bytes: int) -> File:
    size, header_bytes = _whole(fields["bytes"]), _whole(fields["header_bytes"])
    digests = base64.b64decode(fields["blocks"], validate=True)
    file = file_of(size, header_bytes, short(fields["header_xxh3_128"]), block_bytes, digests)
    if header_bytes > size or len(digests) != DIGEST_BYTES * len(file.starts):
        raise BadValue(f"a file of {size} bytes has {len(digests)} bytes of checksums")
    return file


def _grid_fields(grid: Grid) -> dict[str, Any]:
    cuts = [[cut.dim, cut.parts, cut.split] for cut in grid.cuts]
    return {"cuts": cuts, "ranks": _even(grid) or list(grid.ranks)}


def _even(grid: Grid) -> dict[str, Any] | None:
    """Ranks that are as far apart along an axis everywhere, told by that; a thousand need not be listed."""
    parts = [cut.parts for cut in grid.cuts]
    places = [math.prod(parts[i + 1 :]) for i in range(len(parts))]
    first = grid.ranks[0]
    steps = [grid.ranks[place] - first if n > 1 else 0 for place, n in zip(places, parts, strict=True)]
    even = min(steps, default=0) >= 0 and _spread(first, steps, parts) == grid.ranks
    return {"first": first, "steps": steps} if even else None


def _spread(first: int, steps: Sequence[int], parts: Sequence[int]) -> Dims:
    along = [range(0, step * n, step) if step else (0,) * n for step, n in zip(steps, parts, strict=True)]
    return tuple(first + sum(index) for index in itertools.product(*along))


def _grid_from(fields: dict[str, Any], world: int) -> Grid:
    cuts = tuple(
        Cut(_whole(dim), _whole(parts, 1), _whole(split, 1)) for dim, parts, split in items(fields["cuts"], MOST_DIMS)
    )
    places = math.prod(cut.parts for cut in cuts)
    if places > world or any(cut.split > world for cut in cuts) or len(cuts) > MOST_DIMS:
        raise BadValue(f"a grid of {places} places for {world} ranks")
    ranks = fields["ranks"]
    if isinstance(ranks, dict):
        first, steps = _whole(ranks["first"]), _dims(ranks["steps"])
        grid = Grid(cuts, _spread(first, steps, [cut.parts for cut in cuts]))
    else:
        grid = Grid(cuts, _dims(ranks))
    if len(grid.ranks) != places or len(grid.places) != places or max(grid.ranks) >= world:
        raise BadValue(f"a grid of {places} places whose ranks are not {places} of {world}")
    return grid


def _entry_from(fields: dict[str, Any], grids: Sequence[Grid]) -> Entry:
    dtype, shape = fields["dtype"], _dims(fields["shape"])
    number, boxes = fields.get("grid"), fields.get("boxes")
    if type(dtype) is not str or dtype not in ITEM_BYTES or len(shape) > MOST_DIMS:
        raise BadValue(f"a tensor of {len(shape)} dimensions and dtype {dtype!r:.20}")
    grid = None if number is None else grids[_whole(number)]
    if grid is not None and any(cut.dim >= len(shape) for cut in grid.cuts):
        raise BadValue(f"a grid that cuts a dimension which a tensor of {len(shape)} does not have")
    if boxes is None:
        return Entry(dtype, shape, grid)
    if grid is None or len(grid.ranks) != 1:
        raise BadValue("a tensor in boxes of its own that are not all in one file")
    listed = tuple((_dims(offset), _dims(size)) for offset, size in items(boxes, MOST_ITEMS))
    return Entry(dtype, shape, grid, listed)


def _dims(said: Any) -> Dims:
    """In a plain loop: of a manifest most of the time goes here."""
    if type(said) is not list:
        raise BadValue("no list where sizes belong")
    for n in said:
        if type(n) is not int or not 0 <= n < MOST:
            whole(n, MOST - 1)
    return tuple(said)


def _whole(said: Any, least: int = 0) -> int:
    return whole(said, MOST - 1, least)
