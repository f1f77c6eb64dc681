"""How a tensor is cut over ranks, told by a few numbers: a grid of ranks, and which dimension each axis of it cuts.

Which box of the tensor a rank holds follows from that, here and nowhere else: whoever writes and whoever reads ask the
same functions, so that no list of boxes has to be written down. No torch here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A box of a tensor that a rank holds."""

    offset: Dims  # in the global tensor
    shape: Dims
    start: Dims  # in the local tensor


@dataclass(frozen=True)
class Cut:
    """An axis of a grid: it cuts one dimension into ceiling-sized parts, the last ones shorter or empty, as torch does.

    A strided shard (FSDP over tensor parallelism on the same dimension) cuts each of `split` stretches so.
    """

    dim: int
    parts: int
    split: int = 1


Cuts = tuple[Cut, ...]


@dataclass(frozen=True)
class Grid:
    """The ranks that together hold a tensor once."""

    cuts: Cuts  # the first varies slowest
    ranks: Dims  # one for each place; a tensor that is whole on one rank has no cut and one place

    @cached_property
    def places(self) -> dict[int, int]:
        """rank → its place"""
        return {rank: place for place, rank in enumerate(self.ranks)}


def alone(rank: int) -> Grid:
    """A tensor that one rank holds whole."""
    return Grid((), (rank,))


@lru_cache(maxsize=1 << 14)
def boxes_at(shape: Dims, cuts: Cuts, place: int) -> tuple[Held, ...]:
    """What the rank at a place holds: a box, several where two axes cut one dimension unevenly, or nothing."""
    coordinate = _coordinate(cuts, place)
    runs = [_runs(size, *_along(cuts, dim, coordinate)) for dim, size in enumerate(shape)]
    if not all(runs):
        return ()
    boxes = itertools.product(*runs)  # of nothing, for a scalar: one empty box
    return tuple(Held(tuple(r[0] for r in b), tuple(r[1] for r in b), tuple(r[2] for r in b)) for b in boxes)


@lru_cache(maxsize=1 << 18)
def count_at(shape: Dims, cuts: Cuts, place: int) -> int:
    """How many numbers of a tensor the rank at a place holds."""
    coordinate, count = _coordinate(cuts, place), 1
    for dim, size in enumerate(shape):
        count *= sum(length for _, length, _ in _runs(size, *_along(cuts, dim, coordinate)))
    return count


def places_in(shape: Dims, cuts: Cuts, offset: Dims, size: Dims) -> Iterator[int]:
    """The places that may hold something of a box. A thousand are not looked at one by one where one cut is plain."""
    dims = sorted({cut.dim for cut in cuts})
    axes = [[i for i, cut in enumerate(cuts) if cut.dim == dim] for dim in dims]
    choices = [
        _indices_in(shape[dim], tuple((cuts[i].parts, cuts[i].split) for i in of_dim), offset[dim], size[dim])
        for dim, of_dim in zip(dims, axes, strict=True)
    ]
    steps = _steps(cuts)
    for picked in itertools.product(*choices):
        pairs = zip(axes, picked, strict=True)
        yield sum(steps[i] * n for of_dim, index in pairs for i, n in zip(of_dim, index, strict=True))


def pieces(held: Held, item_bytes: int, limit_bytes: int) -> Iterator[Held]:
    """Cuts a box into contiguous pieces of at most `limit_bytes` (but at least one item).

    A piece is what is copied from a device at once: it bounds memory.
    """
    shape = held.shape
    cut = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * item_bytes <= limit_bytes), len(shape) - 1)
    if not shape or math.prod(shape) * item_bytes <= limit_bytes:
        yield held
        return
    step = max(1, limit_bytes // (math.prod(shape[cut + 1 :]) * item_bytes))
    leading = itertools.product(*(range(n) for n in shape[:cut]))
    for index, begin in itertools.product(leading, range(0, shape[cut], step)):
        inner = (*index, begin, *(0 for _ in shape[cut + 1 :]))
        size = (*(1 for _ in index), min(step, shape[cut] - begin), *shape[cut + 1 :])
        yield Held(_plus(held.offset, inner), size, _plus(held.start, inner))


def intersect(offset_a: Dims, shape_a: Dims, offset_b: Dims, shape_b: Dims) -> tuple[Dims, Dims] | None:
    """The box that two boxes share, or None."""
    low = tuple(max(a, b) for a, b in zip(offset_a, offset_b, strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(offset_a, shape_a, offset_b, shape_b, strict=True))
    if any(h <= o for o, h in zip(low, high, strict=True)):
        return None
    return low, tuple(h - o for o, h in zip(low, high, strict=True))


def tiles(shape: Dims, boxes: Sequence[tuple[Dims, Dims]]) -> bool:
    """Whether the boxes (offset, shape) cover the tensor exactly once."""
    if any(len(o) != len(shape) or len(s) != len(shape) for o, s in boxes):
        return False
    if any(o < 0 or n <= 0 or o + n > whole for box in boxes for o, n, whole in zip(*box, shape, strict=True)):
        return False
    if sum(math.prod(s) for _, s in boxes) != math.prod(shape):
        return False
    if len(boxes) < 2:
        return True
    if not shape:
        return False
    # Within bounds and with the right sum, only an overlap could hide a hole. Sweep along the dimension that is cut the
    # most: a thousand shards then have one neighbour each instead of a thousand.
    d = max(range(len(shape)), key=lambda i: len({o[i] for o, _ in boxes}))
    active: list[tuple[Dims, Dims]] = []
    for box in sorted(boxes, key=lambda b: b[0][d]):
        active = [a for a in active if a[0][d] + a[1][d] > box[0][d]]
        if any(intersect(*a, *box) for a in active):
            return False
        active.append(box)
    return True


def _steps(cuts: Cuts) -> list[int]:
    """How far apart the places are that differ by one along each axis."""
    return [math.prod(cut.parts for cut in cuts[i + 1 :]) for i in range(len(cuts))]


def _coordinate(cuts: Cuts, place: int) -> list[int]:
    coordinate = []
    for cut in reversed(cuts):
        place, index = divmod(place, cut.parts)
        coordinate.append(index)
    return coordinate[::-1]


def _along(cuts: Cuts, dim: int, coordinate: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], Dims]:
    """The cuts of one dimension, (parts, split) each, and the place along them."""
    of_dim = [i for i, cut in enumerate(cuts) if cut.dim == dim]
    return tuple((cuts[i].parts, cuts[i].split) for i in of_dim), tuple(coordinate[i] for i in of_dim)


@lru_cache(maxsize=1 << 16)
def _runs(size: int, cuts: tuple[tuple[int, int], ...], index: Dims) -> tuple[tuple[int, int, int], ...]:
    """(global begin, length, local begin) of the stretches of one dimension that a place along its cuts holds."""
    runs = [(0, size)] if size else []
    for (parts, split), i in zip(cuts, index, strict=True):
        runs = [run for part in range(split) for run in _chunk(_chunk(runs, split, part), parts, i)]
    merged: list[tuple[int, int]] = []
    for begin, end in runs:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    local = itertools.accumulate((end - begin for begin, end in merged), initial=0)
    return tuple((begin, end - begin, at) for (begin, end), at in zip(merged, local, strict=False))


def _chunk(runs: list[tuple[int, int]], count: int, index: int) -> list[tuple[int, int]]:
    """The `index`-th of `count` ceiling-sized chunks of a list of stretches (begin, end)."""
    size = sum(end - begin for begin, end in runs)
    width = -(-size // count)
    low, high = min(index * width, size), min((index + 1) * width, size)
    out, at = [], 0
    for begin, end in runs:
        a, b = max(low - at, 0), min(high - at, end - begin)
        if a < b:
            out.append((begin + a, begin + b))
        at += end - begin
    return out


@lru_cache(maxsize=1 << 12)
def _indices_in(size: int, cuts: tuple[tuple[int, int], ...], offset: int, length: int) -> tuple[Dims, ...]:
    """The places along the cuts of one dimension that hold something of a stretch of it."""
    if not size or not length:
        return ()
    if len(cuts) == 1 and cuts[0][1] == 1:
        width = -(-size // cuts[0][0])
        return tuple((i,) for i in range(offset // width, (offset + length - 1) // width + 1))
    everywhere = itertools.product(*(range(parts) for parts, _ in cuts))
    return tuple(
        index
        for index in everywhere
        if any(begin < offset + length and offset < begin + n for begin, n, _ in _runs(size, cuts, index))
    )


def _plus(a: Dims, b: Dims) -> Dims:
    return tuple(x + y for x, y in zip(a, b, strict=True))
