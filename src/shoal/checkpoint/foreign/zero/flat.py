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


@dataclass(frozen=True)
class Spread:
    """A tensor of `count` numbers, of which each row has `each` from `begin` on; what is too much is at the end."""

    rows: Sequence[Numbers]
    begin: int
    each: int
    count: int

    @property
    def dtype(self) -> str:
        return self.rows[0].dtype

    def read(self, begin: int, count: int) -> torch.Tensor:
        parts = []
        while count:
            rank, first = divmod(begin, self.each)
            some = min(count, self.each - first)
            parts.append(self.rows[rank].read(self.begin + first, some))
            begin, count = begin + some, count - some
        return _cat(parts, self.dtype)


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


def in_parts(shapes: Mapping[str, Dims], rows: Sequence[Numbers]) -> dict[str, Spread]:
    """The tensors of ZeRO 3, of which each process has a part in its row."""
    found, at = {}, 0
    for name, shape in shapes.items():
        each = -(-math.prod(shape) // len(rows))
        found[name] = Spread(rows, at, each, math.prod(shape))
        at += each
    _check_parts(rows, at, "the sum of its shapes")
    return found


def spread(name: str, shape: Dims, parts: Sequence[Numbers]) -> Spread:
    """One tensor, of its parts."""
    each = -(-math.prod(shape) // len(parts))
    _check_parts(parts, each, f"the shape of {shown(name)}")
    return Spread(parts, 0, each, math.prod(shape))


def _check_parts(rows: Sequence[Numbers], count: int, what: str) -> None:
    if wrong := [row.count for row in rows if row.count != count]:
        raise Refused(f"{what} needs {count:,} numbers of each process, and one has {wrong[0]:,}")
    if len({row.dtype for row in rows}) > 1:
        raise Refused("its processes hold numbers of several dtypes")


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
