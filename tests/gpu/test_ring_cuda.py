"""Ring attention's arithmetic with CUDA's kernels: a ring of several on one GPU, whose blocks are handed over by hand.

NCCL wants a GPU a process, so no message is sent here: `tests/parallel/test_context.py` sends them, on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.model.attention import attend, attention_mask
from shoal.parallel import context, pairs
from shoal.parallel.partial import HIDDEN, merge_, partial_attention, partial_backward
from shoal.parallel.ring import attend_to_, gradients_to_, nothing_yet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

# A CPU runs the same code with its own kernel, which is how this file is tried where there is no GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEQ, BATCH = 480, 2
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CLOSE = {torch.float32: 5e-5, torch.bfloat16: 1e-2}  # between two ways of computing one thing


def packed(*lengths: tuple[int, ...]) -> Tensor:
    rows = [[n for n, length in enumerate(row) for _ in range(length)] for row in lengths]
    return torch.tensor(rows, device=DEVICE)


def inputs(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, and a gradient of the result."""
    generator = torch.Generator().manual_seed(2)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(BATCH, SEQ, n, head_dim, generator=generator).to(DEVICE, dtype) for n in counts]


def alone(documents: Tensor | None, window: int | None, tensors: list[Tensor]) -> list[Tensor]:
    """Result and gradients in float64, by torch's plain attention."""
    q, k, v = (t.double().requires_grad_() for t in tensors[:3])
    if (mask := attention_mask(documents, SEQ, window, DEVICE)) is None:
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool, device=DEVICE).tril()
    groups = q.shape[2] // k.shape[2]
    copies = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    out = attend(q, *copies, mask, 1)  # type: ignore[misc]  # two of them
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


def ring(size: int, documents: Tensor | None, window: int | None, tensors: list[Tensor]) -> list[Tensor]:
    """Result and gradients of all processes of a ring, one after the other."""
    places = [torch.from_numpy(context.indices(SEQ, size, i, "ring")).to(DEVICE) for i in range(size)]
    parts = [[t[:, at] for t in tensors] for at in places]
    blocks = [torch.stack(part[1:3]) for part in parts]
    block_grads = [torch.zeros(block.shape, device=DEVICE) for block in blocks]
    whole = [torch.zeros_like(t) for t in (tensors[0], *tensors[:3])]
    for index, (q, _, _, grad) in enumerate(parts):
        plan = pairs.plan(documents, SEQ // size, window, DEVICE, size=size, index=index)
        steps = pairs.by_step(plan.pieces, size)
        out, lse = nothing_yet(q)
        for step, todo in enumerate(steps):
            attend_to_(blocks[(index - step) % size], todo, plan.documents, q, out, lse)
        out = out.to(q.dtype)
        dq = torch.zeros(q.shape, device=DEVICE)
        for step, todo in enumerate(steps):
            owner = (index - step) % size
            block_grads[owner] += gradients_to_(blocks[owner], todo, plan.documents, grad, q, out, lse, dq)
        whole[0][:, places[index]], whole[1][:, places[index]] = out, dq.to(q.dtype)
    for at, (dk, dv) in zip(places, block_grads, strict=True):
        whole[2][:, at], whole[3][:, at] = dk.to(whole[2].dtype), dv.to(whole[3].dtype)
    return whole


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(found, exact, strict=True))


DOCUMENTS = {
    "one": None,
    "long": ((100, 300, 80), (480,)),
    "short": ((33, 7, 60, 121, 59, 200), (60, 60, 120, 1, 39, 80, 120)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("packing", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 70])
def test_a_ring_agrees_with_plain_attention(packing: str, window: int | None, size: int, dtype: torch.dtype) -> None:
    lengths = DOCUMENTS[packing]
    documents = None if lengths is None else packed(*lengths)
    for heads, kv_heads, head_dim in ((4, 4, 64), (8, 2, 128), (6, 2, 20)):  # 20: heads that CUDA wants padded
        tensors = inputs(heads, kv_heads, head_dim, dtype)
        difference = worst(ring(size, documents, window, tensors), alone(documents, window, tensors))
        print(packing, window, size, dtype, (heads, kv_heads, head_dim), difference)
        assert difference < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (77, 53), (40, 200)])
def test_a_mask_that_hides_nothing_changes_nothing(dtype: torch.dtype, queries: int, keys: int) -> None:
    """Two kernels on a GPU in bf16: flash without a bias, the efficient one with it."""
    q, k, v, grad = inputs(8, 2, 64, dtype)
    q, grad, k, v = q[:, :queries], grad[:, :queries], k[:, :keys], v[:, :keys]
    zeros = torch.zeros(1, 1, queries, keys, dtype=dtype, device=DEVICE)
    plain, masked = (partial_attention(q, k, v, bias=bias) for bias in (None, zeros))
    assert worst(list(masked), list(plain)) < CLOSE[dtype]
    grads = [partial_backward(grad, q, k, v, *plain, bias=bias) for bias in (None, zeros)]
    assert worst(list(grads[1]), list(grads[0])) < 3 * CLOSE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_no_key_of_a_part_is_left_as_it_was(dtype: torch.dtype) -> None:
    q, k, v, grad = inputs(4, 2, 64, dtype)
    out, lse = nothing_yet(q)
    merge_(out, lse, *partial_attention(q, k, v, causal=True))
    before, lse_before = out.clone(), lse.clone()
    hidden = torch.full((1, 1, SEQ, SEQ), HIDDEN, dtype=dtype, device=DEVICE)
    merge_(out, lse, *partial_attention(q, k, v, bias=hidden))
    assert torch.equal(out, before)
    assert torch.equal(lse, lse_before)
    for gradient in partial_backward(grad, q, k, v, out.to(dtype), lse, bias=hidden):
        assert not gradient.any()


def test_a_masked_part_may_come_first() -> None:
    """Then its queries that see nothing hold a mean of all values, until a part comes in which they see something."""
    q, k, v, _ = inputs(4, 4, 64, torch.float32)
    out, lse = nothing_yet(q)
    merge_(out, lse, *partial_attention(q, k, v, bias=torch.full((1, 1, SEQ, SEQ), HIDDEN, device=DEVICE)))
    merge_(out, lse, *partial_attention(q, k, v, causal=True))
    assert worst([out, lse], list(partial_attention(q, k, v, causal=True))) < 1e-6
