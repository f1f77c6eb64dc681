"""Which part of each tensor this rank holds, and which part of that it writes.

A plain tensor is whole on each rank that holds it: all of them, or those of a pipeline stage. A DTensor's local part is
one box of the global tensor, or several where two mesh dimensions shard the same dimension unevenly. Parts that several
ranks hold are written by one of them, and this work is spread: each rank computes the same assignment from what it
knows, nobody asks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shoal.checkpoint.manifest import Dims
from shoal.checkpoint.peers import here
from shoal.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
Holders = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Held:
    """A box of a tensor that this rank holds."""

    offset: Dims  # in the global tensor
    shape: Dims
    start: Dims  # in the local tensor


def dtype_of(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"tensor '{name}' has dtype {tensor.dtype}, which a checkpoint cannot hold.")
    return DTYPES[tensor.dtype]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of it, to read from or write into."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held_boxes(name: str, tensor: torch.Tensor) -> list[Held]:
    """What this rank holds of a tensor; an empty list when that is nothing."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return [Held((0,) * len(shape), shape, (0,) * len(shape))] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is no part of the tensor's mesh
        return []
    if any(p.is_partial() for p in tensor.placements):
        raise CheckpointError(f"tensor '{name}' is a partial sum on each rank; reduce it before it is saved or loaded.")
    cuts, sizes = tensor.placements, tensor.device_mesh.shape
    runs = [list(_runs(size, dim, cuts, sizes, coordinate)) for dim, size in enumerate(shape)]
    local_shape = tuple(sum(n for _, n, _ in of_dim) for of_dim in runs)
    held_shape = tuple(local_of(tensor).shape)
    if local_shape != held_shape:
        raise CheckpointError(
            f"tensor '{name}' holds {held_shape} here, where {cuts} over {sizes} gives {local_shape}: unknown layout."
        )
    if not math.prod(local_shape):
        return []
    boxes = itertools.product(*runs)  # of nothing, for a scalar: one empty box
    return [Held(tuple(r[0] for r in box), tuple(r[1] for r in box), tuple(r[2] for r in box)) for box in boxes]


def mine_to_write(tensors: Mapping[str, torch.Tensor], holders: Holders | None = None) -> list[str]:
    """The names of the tensors whose held boxes this rank writes.

    The copies of a tensor take turns: the largest first, each to the copy with the least to write so far. The tensors
    that are copied over the same ranks form a group with its own balance; its members see the same names and sizes,
    which is all that they have to agree on: other ranks may have other tensors.
    """
    written: dict[Hashable, list[int]] = defaultdict(list)
    mine = []
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].numel() * item[1].element_size(), item[0])):
        group, copies, copy = _copies(tensor, None if holders is None else holders.get(name))
        if not copies:
            continue  # none of this mesh's copies is to be written: another stage's is
        load = written[group]
        load.extend([0] * (copies - len(load)))
        writer = load.index(min(load))
        load[writer] += tensor.numel() * tensor.element_size()
        if writer == copy:
            mine.append(name)
    return sorted(mine)


def pieces(held: Held, item_bytes: int, limit_bytes: int) -> Iterator[Held]:
    """Cuts a box into contiguous pieces of at most `limit_bytes` (but at least one item).

    A piece is what is copied from a device, hashed and read at once: it bounds memory, and what a rank reads beyond its
    own part when the next run is cut differently.
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


def view_of(local: torch.Tensor, start: Dims, shape: Dims) -> torch.Tensor:
    return local[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    array = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # an array is a buffer; its stubs say so from Python 3.12 on


def _copies(tensor: torch.Tensor, holders: Sequence[int] | None) -> tuple[Hashable, int, int]:
    """(the ranks that share the work, how many copies may be written, which of them is here; -1 for none)"""
    rank, world = here()
    if not isinstance(tensor, DTensor):
        ranks = tuple(range(world)) if holders is None else tuple(sorted(set(holders)))
        return ranks, len(ranks), ranks.index(rank) if rank in ranks else -1
    # A row a copy: the ranks which together hold the tensor once.
    grid = tensor.device_mesh.mesh
    over = [d for d, placement in enumerate(tensor.placements) if placement.is_replicate()]
    cut = [d for d in range(grid.ndim) if d not in over]
    rows = grid.permute(*over, *cut).reshape(math.prod(grid.shape[d] for d in over), -1).tolist()
    written = [row for row in rows if holders is None or set(row) <= set(holders)]
    copy = next((i for i, row in enumerate(written) if rank in row), -1)
    return tuple(map(tuple, written)), len(written), copy


def _runs(
    size: int, dim: int, placements: Sequence[Placement], mesh_shape: Dims, coordinate: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """(global begin, length, local begin) of the stretches of one dimension that a coordinate of the mesh holds.

    Shards are cut from the left mesh dimension to the right, as torch does: ceiling-sized chunks, the last ones shorter
    or empty. A strided shard (FSDP over tensor parallelism on the same dimension) cuts each of `split_factor` parts.
    """
    runs = [(0, size)] if size else []
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate() or getattr(placement, "dim", None) != dim:
            continue
        parts = int(getattr(placement, "split_factor", 1))
        runs = [
            stretch
            for part in range(parts)
            for stretch in _chunk(_chunk(runs, parts, part), mesh_shape[mesh_dim], coordinate[mesh_dim])
        ]
    merged: list[tuple[int, int]] = []
    for begin, end in runs:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    local = 0
    for begin, end in merged:
        yield begin, end - begin, local
        local += end - begin
    if not merged:
        yield 0, 0, 0


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


def _plus(a: Dims, b: Dims) -> Dims:
    return tuple(x + y for x, y in zip(a, b, strict=True))
