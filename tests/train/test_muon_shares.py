"""Muon's matrices are shared out over the processes that hold their rows: each does its part, the bits stay."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shoal.plan.review import muon_work
from shoal.train import muon
from shoal.train.muon_shares import rows_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Rows that do not divide by the processes, fewer rows than processes, and a number of matrices that leaves some idle.
SHAPES = [(8, 6), (5, 12), (6, 8), (1, 4), (7, 7), (3, 9), (8, 6)]
MESHES: dict[str, tuple[tuple[int, ...], list[Placement], list[int]]] = {
    "FSDP": ((2,), [Shard(0)], [4, 3]),
    "FSDP of 4": ((4,), [Shard(0)], [2, 2, 2, 1]),
    "HSDP": ((2, 2), [Replicate(), Shard(0)], [4, 3, 4, 3]),
    "tensor parallelism": ((2,), [Shard(1)], [7, 7]),
}


def tensors() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=made), torch.randn(shape, generator=made)) for shape in SHAPES]


def stepped(weights: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    parameters = [torch.nn.Parameter(w) for w in weights]
    optimizer = muon.Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    for p, grad in zip(parameters, grads, strict=True):
        optimizer.state[p]["momentum"] = torch.zeros_like(p)
        p.grad = grad
    for _ in range(2):
        optimizer.step()


@pytest.mark.parametrize("mesh", MESHES)
def test_each_process_orthogonalises_its_share_and_the_bits_are_those_of_one(mesh: str) -> None:
    sizes, placements, shares = MESHES[mesh]

    def work(rank: int, world: int) -> tuple[int, bool]:
        counted, real = [], muon.orthogonalise
        muon.orthogonalise = lambda m: (counted.append(m.shape), real(m))[1]
        over = init_device_mesh("cpu", sizes)
        laid = [tuple(distribute_tensor(t, over, placements, src_data_rank=None) for t in pair) for pair in tensors()]
        stepped([w for w, _ in laid], [g for _, g in laid])
        done, alone = len(counted), tensors()
        muon.orthogonalise = real
        stepped([w for w, _ in alone], [g for _, g in alone])
        assert all(isinstance(w, DTensor) for w, _ in laid)
        same = all(torch.equal(w.full_tensor(), x) for (w, _), (x, _) in zip(laid, alone, strict=True))
        return done, same

    found = run_ranks(work, len(shares))
    assert [same for _, same in found] == [True] * len(shares)
    assert [done for done, _ in found] == [2 * n for n in shares]  # of two steps


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for rows in range(1, 12):
        cut = [len(part) for part in torch.chunk(torch.zeros(rows), 4)]
        assert rows_of(rows, 4) == cut + [0] * (4 - len(cut))


def test_a_review_counts_the_iterations_that_are_done() -> None:
    """`shoal.plan.review` imports no torch, so it has the number for itself."""
    assert muon_work.ITERATIONS == muon.ITERATIONS
