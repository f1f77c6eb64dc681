"""Which part of each tensor this rank holds, and who writes it.

A plain tensor is whole on each rank that holds it: all of them, or those of a pipeline stage. A DTensor's local part is
one box of the global tensor, or several where two mesh dimensions shard the same dimension unevenly. Parts that several
ranks hold are written by one of them, and this work is spread: each rank computes the same assignment from what it
knows, nobody asks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from shoal.checkpoint.grids import Cut, Cuts, Dims, Grid, Held, alone, boxes_at
from shoal.errors import CheckpointError
from shoal.parallel.agree import here

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
        return list(boxes_at(shape, (), 0))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is no part of the tensor's mesh
        return []
    axes, cuts = _cuts(name, tensor)
    place = 0
    for axis, cut in zip(axes, cuts, strict=True):
        place = place * cut.parts + coordinate[axis]
    boxes = boxes_at(shape, cuts, place)
    held_shape = tuple(local_of(tensor).shape)
    ends = [tuple(start + n for start, n in zip(box.start, box.shape, strict=True)) for box in boxes]
    local_shape = tuple(max(end) for end in zip(*ends, strict=True))
    if local_shape != held_shape and (boxes or 0 not in held_shape):
        raise CheckpointError(
            f"tensor '{name}' holds {held_shape} here, where {tensor.placements} over {tensor.device_mesh.shape} "
            f"gives {local_shape}: unknown layout."
        )
    return list(boxes)


def grids_of(tensors: Mapping[str, torch.Tensor], holders: Holders | None = None) -> dict[str, Grid | None]:
    """Who writes each tensor; None where that is another stage's, which this rank does not know.

    The copies of a tensor take turns: the largest first, each to the copy with the least to write so far. The tensors
    that are copied over the same ranks form a group with its own balance; its members see the same names and sizes,
    which is all that they have to agree on: other ranks may have other tensors.
    """
    written: dict[Hashable, list[int]] = defaultdict(list)
    known: dict[Hashable, list[Grid]] = {}
    grids: dict[str, Grid | None] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].numel() * item[1].element_size(), item[0])):
        of = None if holders is None or name not in holders else tuple(sorted(set(holders[name])))
        layout: Hashable = (tensor.device_mesh, tensor.placements, of) if isinstance(tensor, DTensor) else of
        if layout not in known:
            known[layout] = _copies(name, tensor, of)
        copies = known[layout]
        if not copies:
            grids[name] = None  # none of this mesh's copies is to be written: another stage's is
            continue
        load = written[tuple(copy.ranks for copy in copies)]
        load.extend([0] * (len(copies) - len(load)))
        writer = load.index(min(load))
        load[writer] += tensor.numel() * tensor.element_size()
        grids[name] = copies[writer]
    return grids


def view_of(local: torch.Tensor, start: Dims, shape: Dims) -> torch.Tensor:
    return local[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    array = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # an array is a buffer; its stubs say so from Python 3.12 on


def _copies(name: str, tensor: torch.Tensor, holders: Sequence[int] | None) -> list[Grid]:
    """Each copy that may be written: the ranks which together hold the tensor once."""
    if not isinstance(tensor, DTensor):
        ranks = range(here()[1]) if holders is None else holders
        return [alone(rank) for rank in ranks]
    grid = tensor.device_mesh.mesh
    axes, cuts = _cuts(name, tensor)
    over = [d for d in range(grid.ndim) if d not in axes]
    rows = grid.permute(*over, *axes).reshape(math.prod(grid.shape[d] for d in over), -1).tolist()
    return [Grid(cuts, tuple(row)) for row in rows if holders is None or set(row) <= set(holders)]


def _cuts(name: str, tensor: DTensor) -> tuple[list[int], Cuts]:
    """The dimensions of the mesh that cut the tensor, and how; over the others it is copied."""
    if any(p.is_partial() for p in tensor.placements):
        raise CheckpointError(f"tensor '{name}' is a partial sum on each rank; reduce it before it is saved or loaded.")
    axes = [d for d, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return axes, tuple(
        Cut(
            tensor.placements[d].dim,  # type: ignore[attr-defined]  # a shard's, strided or not
            tensor.device_mesh.shape[d],
            int(getattr(tensor.placements[d], "split_factor", 1)),
        )
        for d in axes
    )
