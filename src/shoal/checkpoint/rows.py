"""Which box of which tensor lies where in which file. In version 2 of the format that is derived from how the tensors
are cut over the ranks (`Layout`), a file or a tensor at a time; in version 1 it was listed. No torch here.

A rank's file holds, of each tensor that it is to write, what its place in the tensor's grid holds: the widest numbers
first, then by name, each box cut into pieces of at most `piece_bytes`. Nothing lies between them.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from shoal.checkpoint.blocks import BLOCK_BYTES, File
from shoal.checkpoint.faulty import Corrupt
from shoal.checkpoint.grids import Dims, Grid, Held, boxes_at, count_at, intersect, pieces, places_in, tiles
from shoal.checkpoint.names import rank_file, rank_of

# The names are safetensors'. What is not here is refused when saving, not guessed when loading.
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Slice:
    """A box of a tensor, contiguous in one file."""

    file: str
    key: str  # its name in the safetensors header
    offset: Dims  # where the box begins in the tensor
    shape: Dims
    at: int  # its first byte in the file, so that it is read without the header (and by a range request)


@dataclass(frozen=True)
class Entry:
    """One tensor, whole."""

    dtype: str
    shape: Dims
    grid: Grid | None = None  # who writes it; None in version 1, and in the layout of a rank that does not know
    boxes: tuple[tuple[Dims, Dims], ...] | None = None  # (offset, shape), where one rank wrote it as it came in

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


class Rows(Protocol):
    def slices(self, name: str) -> Iterator[Slice]:
        """All of a tensor."""
        ...

    def slices_in(self, name: str, offset: Dims, shape: Dims) -> Iterator[Slice]:
        """Those that hold something of a box of it."""
        ...

    def in_file(self, file: str) -> list[tuple[str, int, Slice]]:
        """(tensor, bytes, slice) in the order of the file."""
        ...


@dataclass(frozen=True)
class Layout:
    """How tensors are cut over the ranks that write them: all that rows are derived from."""

    tensors: Mapping[str, Entry]
    piece_bytes: int = PIECE_BYTES
    block_bytes: int = BLOCK_BYTES

    def held(self, name: str, rank: int) -> Iterator[Held]:
        """The pieces of a tensor that a rank writes, in the order of its file."""
        entry = self.tensors[name]
        assert entry.grid is not None
        if entry.boxes is not None:
            boxes = tuple(Held(offset, shape, (0,) * len(shape)) for offset, shape in entry.boxes)
        else:
            boxes = boxes_at(entry.shape, entry.grid.cuts, entry.grid.places[rank])
        for box in boxes:
            yield from pieces(box, entry.item_bytes, self.piece_bytes)

    def bytes_of(self, name: str, rank: int) -> int:
        """What a rank writes of a tensor."""
        entry = self.tensors[name]
        assert entry.grid is not None
        if entry.boxes is not None:
            return math.prod(entry.shape) * entry.item_bytes
        return count_at(entry.shape, entry.grid.cuts, entry.grid.places[rank]) * entry.item_bytes

    def names_of(self, rank: int) -> tuple[str, ...]:
        """The tensors of which a rank writes something, in the order of its file."""
        groups = self._groups_of.get(rank, ())
        if groups not in self._ordered:
            names = (name for i in groups for name in self._groups[i][1])
            # Widest first: all are aligned.
            self._ordered[groups] = tuple(sorted(names, key=lambda n: (-self.tensors[n].item_bytes, n)))
        return self._ordered[groups]

    def sizes(self) -> dict[int, int]:
        """rank → bytes of tensors in its file. Tensors of one kind are counted together: a model has few kinds."""
        sizes: dict[int, int] = defaultdict(int)
        for grid, names in self._groups:
            kinds: dict[tuple[str, Dims], int] = defaultdict(int)
            for name in names:
                entry = self.tensors[name]
                kinds[entry.dtype, entry.shape] += 1
            for (dtype, shape), count in kinds.items():
                for place, rank in enumerate(grid.ranks):
                    sizes[rank] += count * count_at(shape, grid.cuts, place) * ITEM_BYTES[dtype]
        return sizes

    def uncovered(self) -> str | None:
        """The first tensor of which nobody says who writes it, or that the boxes it came in do not cover once."""
        for name, entry in self.tensors.items():
            boxes = entry.boxes
            if entry.grid is None or (boxes is not None and not tiles(entry.shape, boxes)):
                return name
        return None

    @cached_property
    def _groups(self) -> list[tuple[Grid, list[str]]]:
        """The tensors of each grid."""
        groups: dict[int, tuple[Grid, list[str]]] = {}
        for name, entry in self.tensors.items():
            if entry.grid is not None:
                groups.setdefault(id(entry.grid), (entry.grid, []))[1].append(name)
        return list(groups.values())

    @cached_property
    def _groups_of(self) -> dict[int, tuple[int, ...]]:
        """rank → the groups that it writes of. Few ranks differ in that."""
        of: dict[int, list[int]] = defaultdict(list)
        for i, (grid, _) in enumerate(self._groups):
            for rank in grid.ranks:
                of[rank].append(i)
        return {rank: tuple(groups) for rank, groups in of.items()}

    @cached_property
    def _ordered(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        """groups → their tensors, in the order in which a file has them; filled when it is asked for."""
        return {}


class Derived:
    """The rows of version 2."""

    def __init__(self, layout: Layout, files: Mapping[str, File]) -> None:
        self._layout, self._files = layout, files
        self._index: dict[int, dict[str, int]] = {}  # of an order of names
        self._starts: dict[int, array[int]] = {}

    def slices(self, name: str) -> Iterator[Slice]:
        entry = self._layout.tensors[name]
        for rank in entry.grid.ranks if entry.grid is not None else ():
            yield from self._of_rank(name, rank)

    def slices_in(self, name: str, offset: Dims, shape: Dims) -> Iterator[Slice]:
        entry = self._layout.tensors[name]
        assert entry.grid is not None
        for place in places_in(entry.shape, entry.grid.cuts, offset, shape):
            for s in self._of_rank(name, entry.grid.ranks[place]):
                if intersect(offset, shape, s.offset, s.shape) is not None:
                    yield s

    def in_file(self, file: str) -> list[tuple[str, int, Slice]]:
        rank = rank_of(file)
        return [
            (name, math.prod(s.shape) * self._layout.tensors[name].item_bytes, s)
            for name in self._layout.names_of(rank)
            for s in self._of_rank(name, rank)
        ]

    def _of_rank(self, name: str, rank: int) -> Iterator[Slice]:
        entry, file = self._layout.tensors[name], rank_file(rank)
        at = -1
        for piece in self._layout.held(name, rank):
            at = at if at >= 0 else self._start(name, rank)
            yield Slice(file, key_of(name, entry, piece.offset, piece.shape), piece.offset, piece.shape, at)
            at += math.prod(piece.shape) * entry.item_bytes

    def _start(self, name: str, rank: int) -> int:
        """Where a tensor begins in a rank's file: after all that come before it."""
        names = self._layout.names_of(rank)
        if rank not in self._starts:
            file = self._files[rank_file(rank)]
            starts, at = array("q"), file.header_bytes
            for each in names:
                starts.append(at)
                at += self._layout.bytes_of(each, rank)
            if at != file.bytes:
                raise Corrupt(f"{rank_file(rank)} has {file.bytes} bytes in manifest.json, where its tensors need {at}")
            self._starts[rank] = starts
        index = self._index.get(id(names))
        if index is None:
            index = self._index[id(names)] = {each: i for i, each in enumerate(names)}
        return self._starts[rank][index[name]]


class Listed:
    """The rows of version 1."""

    def __init__(self, tensors: Mapping[str, Entry], slices: Mapping[str, Sequence[Slice]]) -> None:
        self._tensors, self._slices = tensors, slices

    def slices(self, name: str) -> Iterator[Slice]:
        yield from self._slices[name]

    def slices_in(self, name: str, offset: Dims, shape: Dims) -> Iterator[Slice]:
        for s in self._slices[name]:
            if intersect(offset, shape, s.offset, s.shape) is not None:
                yield s

    def in_file(self, file: str) -> list[tuple[str, int, Slice]]:
        return self._by_file.get(file, [])

    @cached_property
    def _by_file(self) -> dict[str, list[tuple[str, int, Slice]]]:
        table: dict[str, list[tuple[str, int, Slice]]] = defaultdict(list)
        for name, slices in self._slices.items():
            for s in slices:
                table[s.file].append((name, math.prod(s.shape) * self._tensors[name].item_bytes, s))
        for of_file in table.values():
            of_file.sort(key=lambda item: item[2].at)
        return table


def key_of(name: str, entry: Entry, offset: Dims, shape: Dims) -> str:
    """A whole tensor has its name; a slice has its place behind it, so that the file alone says what it holds."""
    return name if shape == entry.shape else f"{name}@{','.join(map(str, offset))}"
