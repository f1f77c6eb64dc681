"""Flat groups: how ZeRO lays many tensors out in one row of numbers, and finds each of them there again.

ZeRO 1 and 2 put the tensors of a group one after the other, some of them padded, and cut the row over the processes.
ZeRO 3 cuts each tensor over the processes, the last part padded, and puts a process's parts one after the other.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shoal.checkpoint.foreign.incoming import Box, Incoming
from shoal.checkpoint.foreign.inert import Refused
from shoal.checkpoint.foreign.zero.state_file import Numbers
from shoal.checkpoint.grids import Dims, Held, pieces
from shoal.checkpoint.layout import TORCH_DTYPES
from shoal.checkpoint.rows import ITEM_BYTES, PIECE_BYTES
from shoal.values import shown


class Joined:
    """Several rows as one, in this order."""

    def __init__(self, rows: Sequence[Numbers]) -> None:
        self._rows = tuple(rows)
        self._ends = tuple(itertools.accumulate(row.count for row in rows))
        self.count = self._ends[-1] if rows else 0
        self.dtype = rows[0].dtype if rows else "F32"
        if any(row.dtype != self.dtype for row in rows):
            raise Refused("its flat groups are of several dtypes")

    def read(self, begin: int, count: int) -> torch.Tensor:
        parts = []
        at = bisect.bisect_right(self._ends, begin)
        while count:
            first = begin - (self._ends[at] - self._rows[at].count)
            some = min(count, self._ends[at] - begin)
            parts.append(self._rows[at].read(first, some))
            begin, count, at = begin + some, count - some, at + 1
        return _cat(parts, self.dtype)


@dataclass(frozen=True)
class Cut:
    """`count` numbers of a row, from `begin` on."""

    row: Numbers
    begin: int
    count: int

    @property
    def dtype(self) -> str:
        return self.row.dtype

    def read(self, begin: int, count: int) -> torch.Tensor:
        return self.row.read(self.begin + begin, count)


def in_a_row(shapes: Mapping[str, Dims], paddings: Sequence[int], row: Numbers, world: int) -> dict[str, Cut]:
    """The tensors of one group of ZeRO 1 or 2."""
    found, at, end = {}, 0, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        found[name] = Cut(row, at, math.prod(shape))
        end = at + found[name].count
        at = end + padding
    align = 2 * world  # the row is filled up to a multiple, of which DeepSpeed saves now all, now none
    if end > row.count or -(-at // align) != -(-row.count // align):
        raise Refused(f"its shapes need {end:,} numbers, and a flat group has {row.count:,}")
    return found


def in_parts(shapes: Mapping[str, Dims], rows: Sequence[Numbers]) -> dict[str, Joined]:
    """The tensors of ZeRO 3, of which each process has a part in its row."""
    found, at = {}, 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        found[name] = spread(name, count, [Cut(row, at, -(-count // len(rows))) for row in rows])
        at += -(-count // len(rows))
    if wrong := [row.count for row in rows if row.count != at]:
        raise Refused(f"its shapes need {at:,} numbers of each process, and a flat group has {wrong[0]:,}")
    return found


def spread(name: str, count: int, parts: Sequence[Numbers]) -> Joined:
    """One tensor of its parts, all of which are of one length: what is too much is at the end."""
    each = -(-count // len(parts))
    if any(part.count != each for part in parts):
        raise Refused(f"the parts of {shown(name)} are not what its shape needs on {len(parts)} processes")
    return Joined([Cut(part, 0, max(0, min(each, count - rank * each))) for rank, part in enumerate(parts)])


def incoming(shape: Dims, numbers: Numbers, kind: str | None = None) -> Incoming:
    """Numbers in a row, as a tensor that is read piece by piece; `kind`: in another dtype."""
    dtype = kind or numbers.dtype
    if not math.prod(shape):
        return Incoming(dtype, shape, ())
    if math.prod(shape) != numbers.count:
        raise Refused(f"a tensor of {numbers.count:,} numbers stands where {list(shape)} belongs")
    whole = Held((0,) * len(shape), shape, (0,) * len(shape))
    cut = pieces(whole, ITEM_BYTES[dtype], PIECE_BYTES)  # each is a stretch of the row
    boxes = (Box(p.offset, p.shape, partial(_read, numbers, shape, p, dtype)) for p in cut)
    return Incoming(dtype, shape, tuple(boxes))


def _read(numbers: Numbers, shape: Dims, piece: Held, dtype: str) -> torch.Tensor:
    begin = 0
    for offset, n in zip(piece.offset, shape, strict=True):
        begin = begin * n + offset
    return numbers.read(begin, math.prod(piece.shape)).to(TORCH_DTYPES[dtype]).view(piece.shape)


def _cat(parts: list[torch.Tensor], dtype: str) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=TORCH_DTYPES[dtype])
