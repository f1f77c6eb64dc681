"""A state that is cut in every way that Shoal knows, and its checkpoint, without a process a rank.

torch's fake process group lets one process be each rank in turn: it has the layout of that rank and no peers. So one
process writes what four would. The checkpoint in `tests/checkpoint/version_1` was made so, by the last Shoal that wrote
version 1 of the format (commit 65967dd).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.checkpoint import Found, Name, read_full
from shoal.checkpoint.layout import bytes_of, local_of, view_of
from shoal.checkpoint.part import write_part
from shoal.checkpoint.publish import complete
from shoal.checkpoint.saving import contents_of
from shoal.checkpoint.store import Folder

WORLD = 4
NAME, EXTRA = Name(12, 3), {"step": 12, "eval_loss": 1.5}
ALL, PAIRS, STAGES = [0, 1, 2, 3], [[0, 1], [2, 3]], ([0, 1], [2, 3])
_S0, _S1, _R = Shard(0), Shard(1), Replicate()

# name → shape, dtype, the ranks of its mesh (None: no DTensor), its placements, the ranks that have it
Row = tuple[tuple[int, ...], torch.dtype, list[int] | list[list[int]] | None, list[Placement], list[int]]
STATE: dict[str, Row] = {
    "model.scale": ((), torch.float32, None, [], ALL),  # replicated, plain
    "model.norm": ((5,), torch.float32, None, [], ALL),
    "model.steps": ((3,), torch.int64, None, [], ALL),
    "model.fsdp": ((7, 3), torch.float32, ALL, [_S0], ALL),  # uneven: the last rank has one row
    "model.few": ((2, 3), torch.float32, ALL, [_S0], ALL),  # two ranks have nothing
    "model.hsdp": ((6, 5), torch.float32, PAIRS, [_R, _S0], ALL),
    "model.hsdp_too": ((6, 5), torch.float32, PAIRS, [_R, _S0], ALL),  # the other copy writes this one
    "model.columns": ((6, 5), torch.bfloat16, PAIRS, [_S0, _S1], ALL),  # FSDP over tensor parallelism
    "model.strided": ((9, 4), torch.float32, PAIRS, [_StridedShard(0, split_factor=2), _S0], ALL),
    "model.experts": ((4, 6, 5), torch.bfloat16, PAIRS, [_S0, _S1], ALL),  # expert parallelism, FSDP inside
    "model.empty": ((0, 3), torch.float32, ALL, [_S0], ALL),
    "model.first.bias": ((11,), torch.float32, None, [], STAGES[0]),  # stages of a pipeline
    "model.first.weight": ((11, 4), torch.float32, STAGES[0], [_S0], STAGES[0]),
    "model.last.bias": ((11,), torch.float32, None, [], STAGES[1]),
    "model.last.weight": ((11, 4), torch.float32, STAGES[1], [_S0], STAGES[1]),
    "optim.fsdp.exp_avg": ((7, 3), torch.float32, ALL, [_S0], ALL),
}


def value_of(name: str) -> torch.Tensor:
    """The whole tensor: numbers that no other place has."""
    shape, dtype, *_ = STATE[name]
    first = 100 * list(STATE).index(name)
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape).to(dtype)


@contextmanager
def as_rank(rank: int, world: int = WORLD) -> Iterator[None]:
    """This process has the place of one rank of many, and no peers: what is exchanged is what it says itself."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def state_of(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """(what the rank holds, `holders`)"""
    tensors: dict[str, torch.Tensor] = {}
    for name, (_, _, mesh, placements, ranks) in STATE.items():
        if rank not in ranks:
            continue
        whole = value_of(name)
        if mesh is None:
            tensors[name] = whole
        else:
            devices = DeviceMesh("cpu", torch.tensor(mesh))
            tensors[name] = distribute_tensor(whole, devices, placements, src_data_rank=None)
    return tensors, {name: ranks for name, (_, _, mesh, _, ranks) in STATE.items() if mesh is None}


def write(root: Path, piece_bytes: int = 100, block_bytes: int = 64) -> None:
    store = Folder(root)
    for rank in range(WORLD):
        with as_rank(rank):
            tensors, holders = state_of(rank)
            contents = contents_of(tensors, holders, piece_bytes, block_bytes)
            slices = [
                bytes_of(view_of(local_of(tensors[piece.tensor]), piece.start, piece.shape).contiguous())
                for piece in contents.pieces
            ]
            write_part(store, NAME, rank, WORLD, contents, slices)
    complete(store, NAME, WORLD, EXTRA)


def assert_all_values(found: Found) -> None:
    values = read_full(found, prefix="")
    assert values.keys() == STATE.keys()
    for name, value in values.items():
        assert value.dtype == STATE[name][1]
        assert torch.equal(value, value_of(name)), name
