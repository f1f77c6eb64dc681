"""The loss over rows of the vocabulary: that of the whole one, in chunks, without anybody holding all the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.model import head
from shoal.model.decoder import Decoder
from shoal.parallel import vocabulary
from shoal.parallel.place import lay_out
from shoal.parallel.tensor import split
from shoal.spec.mesh import Sizes
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

VOCAB, DIM, BATCH = 52, 12, 3


def problem(seq: int, spread: float = 1.0, targets: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seq)
    hidden = torch.randn(BATCH, seq, DIM, generator=generator) * spread
    weight = torch.randn(VOCAB, DIM, generator=generator)
    wanted = torch.randint(0, VOCAB, (BATCH, seq), generator=generator)
    unwanted = torch.rand(BATCH, seq, generator=generator) < (0.3 if targets else 2.0)
    return hidden, weight, wanted.masked_fill(unwanted, head.NO_TARGET)


def in_rows(
    rank: int, world: int, problem: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, z_loss: float = 0.0
) -> list[Tensor]:
    """Loss, and gradients of 3 x loss by the whole weight and this process's stretch."""
    mesh = init_device_mesh("cpu", (world,))
    hidden, weight, targets = problem
    stretch = hidden.to(dtype).chunk(world, dim=1)[rank].clone().requires_grad_()
    rows = torch.nn.Parameter(distribute_tensor(weight.to(dtype), mesh, [Shard(0)]))
    loss = vocabulary.summed_cross_entropy(stretch, rows, targets, z_loss)
    (3 * loss).backward()
    assert isinstance(rows.grad, DTensor)
    assert rows.grad.placements == (Shard(0),)
    assert stretch.grad is not None
    return [loss.detach(), rows.grad.full_tensor(), stretch.grad]


def together(found: list[list[Tensor]]) -> list[Tensor]:
    assert all(torch.equal(rank[0], found[0][0]) for rank in found), "one number, the same bits on every process"
    return [found[0][0], found[0][1], torch.cat([rank[2] for rank in found], dim=1)]


def at_once(problem: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, z_loss: float = 0.0) -> list[Tensor]:
    hidden, weight, targets = problem
    hidden, weight = (t.to(dtype).requires_grad_() for t in (hidden, weight))
    loss = head.summed_cross_entropy(hidden, weight, targets, z_loss)
    (3 * loss).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), weight.grad, hidden.grad]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("seq", [8, 88])  # 88: chunks of 32 or 16 of a process's 132 or 66 tokens, the last one short
def test_loss_and_gradients_are_those_of_the_whole_vocabulary(
    world: int, seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CPU_CHUNK_BYTES", 1)
    found = together(run_ranks(in_rows, world, problem(seq), torch.float32))
    for mine, theirs in zip(found, at_once(problem(seq), torch.float32), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-5)


def test_a_z_loss_is_in_the_gradient_and_not_in_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its definition, in chunks, and with the vocabulary in rows."""
    monkeypatch.setattr(head, "CPU_CHUNK_BYTES", 1)
    asked, z = problem(88), 0.05
    hidden, weight = (t.clone().requires_grad_() for t in asked[:2])
    logits, targets = (hidden @ weight.t()).flatten(0, 1), asked[2].flatten()
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    squares = (logits.logsumexp(-1).square() * (targets != head.NO_TARGET)).sum()
    (3 * (plain + z * squares)).backward()
    wanted = [plain.detach(), weight.grad, hidden.grad]
    rows = together(run_ranks(in_rows, 2, problem(88), torch.float32, z))
    for found in (at_once(problem(88), torch.float32, z), rows):
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-4)
    assert not torch.allclose(at_once(problem(88), torch.float32)[1], wanted[1])  # type: ignore[arg-type]  # it has one


def test_logits_far_apart_between_processes_neither_overflow_nor_vanish() -> None:
    far = problem(8, spread=300.0)
    found = together(run_ranks(in_rows, 2, far, torch.float32))
    assert all(t.isfinite().all() for t in found)
    for mine, theirs in zip(found, at_once(far, torch.float32), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-3)


def test_without_a_single_target_loss_and_gradients_are_zero() -> None:
    found = together(run_ranks(in_rows, 2, problem(8, targets=False), torch.float32))
    assert not any(t.any() for t in found)


def test_bfloat16_is_as_near_as_one_process_comes() -> None:
    exact, rounded = (at_once(problem(88), dtype) for dtype in (torch.float32, torch.bfloat16))
    found = together(run_ranks(in_rows, 2, problem(88), torch.bfloat16))

    def off(values: list[Tensor]) -> list[float]:
        return [float((v.float() - e).norm() / e.norm()) for v, e in zip(values, exact, strict=True)]

    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert all(mine < 1.3 * theirs + 1e-4 for mine, theirs in zip(off(found), off(rounded), strict=True))


class Largest(TorchDispatchMode):
    """The most numbers that any tensor of a process has had, with its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[int, tuple[int, ...]] = (0, ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                local = t.to_local() if isinstance(t, DTensor) else t
                self.seen = max(self.seen, (local.numel(), tuple(local.shape)))
        return out


def test_no_process_ever_holds_all_logits_nor_all_rows_of_the_vocabulary() -> None:
    shape = shape_of(Model(vocab_size=2048, dim=16, layers=1, heads=4, kv_heads=4, ffn_dim=32, tie_embeddings=True))
    tokens = torch.randint(0, shape.vocab_size, (4, 128), generator=torch.Generator().manual_seed(0))

    def step(rank: int, world: int) -> tuple[int, tuple[int, ...]]:
        with torch.device("meta"):
            decoder = Decoder(shape)
        split(decoder, lay_out(rank, world, torch.device("cpu"), Sizes(tp=world)))
        decoder.to_empty(device="cpu")
        decoder.init_weights(0)
        with Largest() as largest:
            decoder(tokens, targets=tokens).backward()
        return largest.seen

    whole = Decoder(shape)
    with Largest() as largest:
        whole(tokens, targets=tokens).backward()
    logits = tokens.numel() * shape.vocab_size
    assert largest.seen[0] == logits  # one chunk at this size: the watcher sees them
    assert [numel for numel, _ in run_ranks(step, 4)] == [logits // 4] * 4
