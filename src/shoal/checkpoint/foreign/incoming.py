"""Tensors on their way in, from whatever holds them: dtype and shape are known, a box is read when its turn comes.

So bringing in a checkpoint takes the memory of one shard, not of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch

from shoal.checkpoint.boxes import read_slice
from shoal.checkpoint.find import Found
from shoal.checkpoint.foreign.dcp import Dcp
from shoal.checkpoint.grids import Dims, Held, intersect, pieces
from shoal.checkpoint.layout import TORCH_DTYPES, view_of
from shoal.checkpoint.rows import PIECE_BYTES
from shoal.model.hf_files import Held as Open

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Box:
    offset: Dims
    shape: Dims
    read: Callable[[], torch.Tensor]  # contiguous, on the CPU


@dataclass(frozen=True)
class Incoming:
    dtype: str  # safetensors' name
    shape: Dims
    boxes: tuple[Box, ...]  # they cover it exactly once

    def whole(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype])
        for box in self.boxes:
            view_of(tensor, box.offset, box.shape).copy_(box.read())
        return tensor


def of_dcp(dcp: Dcp) -> dict[str, Incoming]:
    return {
        name: Incoming(
            stored.dtype, stored.shape, tuple(Box(s.offset, s.shape, partial(dcp.read, name, s)) for s in stored.shards)
        )
        for name, stored in dcp.tensors.items()
    }


def of_checkpoint(found: Found) -> dict[str, Incoming]:
    return {
        name: Incoming(
            entry.dtype,
            entry.shape,
            tuple(
                Box(s.offset, s.shape, partial(read_slice, found, name, s)) for s in found.manifest.rows.slices(name)
            ),
        )
        for name, entry in found.manifest.tensors.items()
    }


def of_safetensors(held: Mapping[str, Open]) -> dict[str, Incoming]:
    """Of open files, by the names of their tensors (`shoal.model.hf_files.open_folder`)."""
    incoming = {}
    for name, file in held.items():
        shape, dtype = file.shape(name), file.dtype(name)
        whole = Held((0,) * len(shape), shape, (0,) * len(shape))
        item_bytes = TORCH_DTYPES[dtype].itemsize
        cut = pieces(whole, item_bytes, PIECE_BYTES) if math.prod(shape) else ()
        boxes = tuple(Box(p.offset, p.shape, partial(_of_file, file, name, p)) for p in cut)
        incoming[name] = Incoming(dtype, shape, boxes)
    return incoming


def stacked(parts: Sequence[Incoming]) -> Incoming:
    """Tensors of one shape as one, along a new first dimension; a single one with that dimension is what it is. Where
    they have several dtypes it has the one that holds them all."""
    dtype = reduce(torch.promote_types, (TORCH_DTYPES[part.dtype] for part in parts))
    boxes = [
        Box((i, *box.offset), (1, *box.shape), partial(_unsqueezed, box.read, dtype))
        for i, part in enumerate(parts)
        for box in part.boxes
    ]
    return Incoming(_NAMES[dtype], (len(parts), *parts[0].shape), tuple(boxes))


def narrowed(whole: Incoming, dim: int, begin: int, length: int) -> Incoming:
    """A stretch of one dimension."""
    offset = tuple(begin if d == dim else 0 for d in range(len(whole.shape)))
    shape = tuple(length if d == dim else n for d, n in enumerate(whole.shape))
    boxes = []
    for box in whole.boxes:
        if (shared := intersect(offset, shape, box.offset, box.shape)) is not None:
            at, size = shared
            start = tuple(a - o for a, o in zip(at, box.offset, strict=True))
            place = tuple(a - o for a, o in zip(at, offset, strict=True))
            boxes.append(Box(place, size, partial(_viewed, box.read, start, size)))
    return Incoming(whole.dtype, shape, tuple(boxes))


def without_ones(whole: Incoming) -> Incoming:
    """Without inner dimensions of one, as a convolution of single channels has."""
    kept = [d for d, n in enumerate(whole.shape) if d == 0 or n != 1]
    boxes = [Box(_of(kept, box.offset), _of(kept, box.shape), partial(_shaped, box.read, kept)) for box in whole.boxes]
    return Incoming(whole.dtype, _of(kept, whole.shape), tuple(boxes))


def half_split(interleaved: Incoming, head_dim: int) -> Incoming:
    """Rows of queries or keys whose rotary pairs are neighbours (Meta's order), in the order in which they are halves.

    A shard may end inside a head, so the tensor is read whole.
    """

    def read() -> torch.Tensor:
        rows = interleaved.whole()
        heads = rows.unflatten(0, (-1, head_dim // 2, 2))  # [heads, pairs, 2, ...]
        return heads.transpose(1, 2).reshape(rows.shape).contiguous()

    box = Box((0,) * len(interleaved.shape), interleaved.shape, read)
    return Incoming(interleaved.dtype, interleaved.shape, (box,))


def _of_file(file: Open, name: str, piece: Held) -> torch.Tensor:
    box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
    return file.read(name, box).contiguous()


def _unsqueezed(read: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return read()[None].to(dtype)


def _viewed(read: Callable[[], torch.Tensor], start: Dims, shape: Dims) -> torch.Tensor:
    return view_of(read(), start, shape).contiguous()


def _of(kept: Sequence[int], dims: Dims) -> Dims:
    return tuple(dims[d] for d in kept)


def _shaped(read: Callable[[], torch.Tensor], kept: Sequence[int]) -> torch.Tensor:
    part = read()
    return part.reshape(_of(kept, tuple(part.shape)))
