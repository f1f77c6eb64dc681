"""Sequences shared by several processes: attention and whole models agree with one process, and the work is even."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.errors import SpecError
from shoal.model.attention import attend, attention_mask
from shoal.model.decoder import Decoder
from shoal.parallel import all_to_all, context, pairs, recompute, ring
from shoal.parallel.place import Place, lay_out
from shoal.spec.mesh import Sizes
from shoal.spec.model import Model, RopeScaling
from shoal.spec.shape import shape_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

BATCH, SEQ, HEAD_DIM = 2, 96, 16
CPU = torch.device("cpu")
METHODS = ["ring", "all_to_all"]


def place_of(rank: int, cp: int) -> Place:
    return lay_out(rank, cp, CPU, Sizes(cp=cp))


def packed(*lengths: tuple[int, ...]) -> Tensor:
    """A row of documents of the given lengths, for each row."""
    return torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in lengths])


# With 2, 3 and 4 processes the ring's chunks have 24, 16 and 12 tokens: boundaries inside chunks and on their edges,
# documents that reach over several chunks, and a row that is one document.
DOCUMENTS = {
    "one": None,
    "long": packed((5, 72, 19), (96,)),
    "short": packed((3, 7, 6, 1, 11, 4, 16, 9, 7, 32), (12, 12, 16, 2, 14, 5, 23, 12)),
    "aligned": packed((24, 48, 24), (48, 24, 24)),
}


def qkv(heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a gradient of the result, whole."""
    generator = torch.Generator().manual_seed(1)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(BATCH, SEQ, n, HEAD_DIM, generator=generator).to(dtype) for n in counts]


def with_gradients(attend: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def alone(documents: Tensor | None, window: int | None, heads: int, kv_heads: int) -> list[Tensor]:
    """Result and gradients of one process, in float64."""
    mask = attention_mask(documents, SEQ, window, CPU)
    return with_gradients(
        partial(attend, mask=mask, groups=heads // kv_heads), *(t.double() for t in qkv(heads, kv_heads, torch.float32))
    )


def shared(
    rank: int, world: int, method: context.Method, cases: list[tuple[Any, ...]], dtype: torch.dtype
) -> list[list[Tensor]]:
    """This rank's part of the result and gradients of every case, through the seams that `split` puts in."""
    place = place_of(rank, world)
    assert place.context is not None
    group = place.context.group_name
    found = []
    for documents, window, heads, kv_heads in cases:
        if method == "ring":
            mask: Any = pairs.plan(documents, SEQ // world, window, CPU, size=world, index=rank)
            seam: Any = partial(ring.attend, group=group)
        else:
            mask = all_to_all.mask(documents, SEQ // world, window, CPU, size=world)
            seam = partial(all_to_all.attend, group=group, size=world)
        mine = [context.cut(t, place, method) for t in qkv(heads, kv_heads, dtype)]
        found.append(with_gradients(partial(seam, mask=mask, groups=heads // kv_heads), *mine))
    return found


def joined(parts: list[Tensor], method: context.Method) -> Tensor:
    """The whole sequence again, from what each rank has of it."""
    whole = torch.empty(BATCH, SEQ, *parts[0].shape[2:], dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[:, torch.from_numpy(context.indices(SEQ, len(parts), rank, method))] = part
    return whole


def differences(
    method: context.Method, world: int, cases: list[tuple[Any, ...]], dtype: torch.dtype = torch.float32
) -> list[float]:
    """Largest difference of each case to one process, relative to the largest number there (or to 1)."""
    ranks = run_ranks(shared, world, method, cases, dtype)
    worst = []
    for i, case in enumerate(cases):
        exact = alone(*case)
        whole = [joined([ranks[r][i][n] for r in range(world)], method) for n in range(4)]
        both = zip(whole, exact, strict=True)
        worst.append(max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in both))
    return worst


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_attention_and_its_gradients_are_those_of_one_process(method: context.Method, world: int) -> None:
    cases = [
        (documents, window, heads, kv_heads)
        for documents in DOCUMENTS.values()
        for window in (None, 1, 13, 40, 100)
        for heads, kv_heads in ((8, 4), (4, 4))
    ]
    for case, worst in zip(cases, differences(method, world, cases), strict=True):
        assert worst < 2e-6, case


@pytest.mark.parametrize("method", METHODS)
def test_attention_in_bf16_is_as_close_as_bf16_is(method: context.Method) -> None:
    cases = [(documents, window, 8, 4) for documents in DOCUMENTS.values() for window in (None, 13)]
    for case, worst in zip(cases, differences(method, 4, cases, torch.bfloat16), strict=True):
        assert worst < 2e-2, case


def test_ring_takes_one_key_and_value_head_and_three_processes() -> None:
    """What the all-to-all cannot: heads that do not divide."""
    cases = [(documents, window, 3, 1) for documents in DOCUMENTS.values() for window in (None, 20)]
    assert max(differences("ring", 3, cases)) < 2e-6


def test_documents_in_any_order_are_masked_right() -> None:
    """Numbers that go up and down: the plan sees only the range of each chunk, and must not skip what is shared."""
    documents = torch.randint(0, 3, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    documents[:, :20] = 7
    for method in METHODS:
        assert max(differences(method, 2, [(documents, None, 4, 2)])) < 2e-6  # type: ignore[arg-type]


# A whole model.

SHAPE = shape_of(
    Model(
        vocab_size=61,
        dim=32,
        layers=2,
        heads=4,
        kv_heads=2,
        ffn_dim=48,
        max_seq_len=SEQ,
        sliding_window=20,
        full_attention_layers=1,
    )
)


def decoder() -> Decoder:
    model = Decoder(SHAPE)
    model.init_weights(3)
    return model


def batch(documents: Tensor | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, SHAPE.vocab_size, (BATCH, SEQ), generator=generator)
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = -100
    positions = torch.arange(SEQ).expand(BATCH, SEQ).clone()
    if documents is not None:
        for row in range(BATCH):
            for n in documents[row].unique():
                at = documents[row] == n
                positions[row, at] = torch.arange(int(at.sum()))
    return {"x": tokens, "positions": positions, "targets": targets}


def loss_and_gradients(model: Decoder, inputs: dict[str, Tensor], documents: Tensor | None) -> dict[str, Tensor]:
    loss = model(documents=documents, **inputs)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def shared_model(
    rank: int, world: int, method: context.Method, mode: recompute.Mode, documents: Tensor | None
) -> dict[str, Tensor]:
    """Loss and gradients, summed over the ranks as FSDP's shard axis sums them."""
    place = place_of(rank, world)
    model = decoder()
    context.split(model, place, method)
    recompute.apply(model, mode)
    inputs = {name: context.cut(t, place, method) for name, t in batch(documents).items()}
    found = loss_and_gradients(model, inputs, documents)
    for value in found.values():
        dist.all_reduce(value)
    return found


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_has_the_loss_and_gradients_of_one_process(method: context.Method, mode: recompute.Mode) -> None:
    for documents in (DOCUMENTS["short"], None) if mode == "none" else (DOCUMENTS["long"],):
        exact = loss_and_gradients(decoder(), batch(documents), documents)
        found = run_ranks(shared_model, 2, method, mode, documents)
        assert found[0].keys() == exact.keys()
        for name, value in exact.items():
            torch.testing.assert_close(found[0][name], value, rtol=2e-5, atol=2e-5, msg=name)


# The work of a ring.


def steps_of(
    size: int, index: int, documents: Tensor | None = None, window: int | None = None
) -> list[list[pairs.Piece]]:
    return pairs.by_step(pairs.plan(documents, SEQ // size, window, CPU, size=size, index=index).pieces, size)


def work_of(size: int, index: int, **how: Any) -> list[int]:
    """(query, key) pairs that a process computes at each step."""
    return [sum(piece.pairs for piece in todo) for todo in steps_of(size, index, **how)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_the_same_for_every_process_at_every_step(size: int) -> None:
    steps = [work_of(size, index) for index in range(size)]
    assert all(mine == steps[0] for mine in steps)
    assert sum(map(sum, steps)) == SEQ * (SEQ + 1) // 2, "and nothing is computed twice, or for nothing"


def test_without_documents_and_windows_no_piece_has_a_mask_and_each_step_is_one_call() -> None:
    for index in range(4):
        steps = steps_of(4, index)
        assert [len(todo) for todo in steps] == [1, 1, 1, 1]
        assert not any(piece.kind == pairs.MASKED for todo in steps for piece in todo)


def test_chunks_that_share_no_document_are_skipped_and_those_within_one_have_no_mask() -> None:
    size, chunk = 4, SEQ // 8
    own, *others = steps_of(size, 1, packed((chunk,) * 8))
    assert [piece.kind for piece in own] == [pairs.CAUSAL, pairs.CAUSAL]
    assert others == [[], [], []]
    half = SEQ // 2  # two documents: queries of the tail (chunk 6) see chunks 4 and 5 whole, and none before
    tail = [piece for todo in steps_of(size, 1, packed((half, half))) for piece in todo if piece.q_at == 6 * chunk]
    assert {(p.k_at // chunk, p.kind) for p in tail} == {(4, pairs.FULL), (5, pairs.FULL), (6, pairs.CAUSAL)}


def test_a_window_leaves_only_chunks_within_reach() -> None:
    everything, near = (sum(sum(work_of(4, i, window=window)) for i in range(4)) for window in (None, 8))
    assert near < 0.6 * everything


def test_a_plan_has_one_shape_whatever_the_documents() -> None:
    """Or every batch that packs otherwise would have the blocks compiled once more."""
    plans = [pairs.plan(documents, SEQ // 2, None, CPU, size=2, index=0) for documents in DOCUMENTS.values()]
    assert {tuple(plan.pieces.shape) for plan in plans} == {(8, len(pairs.Piece._fields))}


def count_sent(monkey: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every message this process sends from now on."""
    sent: list[int] = []
    real = dist.batch_isend_irecv

    def counting(ops: list[Any]) -> Any:
        sent.extend(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real(ops)

    monkey.setattr(dist, "batch_isend_irecv", counting)
    return sent


def exchanges(rank: int, world: int, documents: Tensor | None) -> tuple[int, int, int]:
    """Exchanges in forward and in backward, and bytes sent."""
    sent = count_sent(pytest.MonkeyPatch())
    place = place_of(rank, world)
    assert place.context is not None
    plan = pairs.plan(documents, SEQ // world, None, CPU, size=world, index=rank)
    q, k, v, grad = (context.cut(t, place, "ring") for t in qkv(8, 4, torch.bfloat16))
    q.requires_grad_()
    out = ring.attend(q, k, v, plan, 2, group=place.context.group_name)
    forward = len(sent)
    out.backward(grad)
    return forward, len(sent) - forward, sum(sent)


def test_every_rank_makes_every_exchange_whatever_it_skips() -> None:
    """n - 1 of keys and values each way, and n - 1 of their gradients in float32."""
    world = 4
    block_bytes = 2 * BATCH * (SEQ // world) * 4 * HEAD_DIM * 2
    total = (world - 1) * (2 * block_bytes + 2 * block_bytes)
    for documents in (None, packed((12,) * 8, (12,) * 8)):
        assert run_ranks(exchanges, world, documents) == [(world - 1, 2 * (world - 1), total)] * world


def exchanges_of_a_model(rank: int, world: int, mode: recompute.Mode) -> int:
    sent = count_sent(pytest.MonkeyPatch())
    shared_model(rank, world, "ring", mode, DOCUMENTS["long"])
    return len(sent)


def test_only_full_recomputation_goes_around_the_ring_once_more() -> None:
    for mode, a_block in (("none", 3), ("selective", 3), ("attention", 3), ("full", 4)):
        assert run_ranks(exchanges_of_a_model, 2, mode) == [a_block * SHAPE.layers] * 2


def compiled(rank: int, world: int) -> tuple[int, int, int]:
    """Graph breaks and graphs of compiled blocks over batches that pack otherwise; and bits that differ."""
    torch._dynamo.reset()  # what other tests have compiled in the process that this one was forked from
    torch._dynamo.utils.counters.clear()
    place = place_of(rank, world)
    models = decoder(), decoder()
    for model in models:
        context.split(model, place, "ring")
    for block in models[1].blocks.values():
        block.compile(backend="eager")  # breaks and graphs are found before a backend has its turn
    unlike = 0
    for documents in (DOCUMENTS["short"], DOCUMENTS["long"], DOCUMENTS["aligned"]):
        inputs = {name: context.cut(t, place, "ring") for name, t in batch(documents).items()}
        eager, now = (loss_and_gradients(model, inputs, documents) for model in models)
        unlike += sum(int((eager[name] != now[name]).sum()) for name in eager)
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"], unlike


def test_a_compiled_block_has_no_break_and_is_compiled_once_for_all_packings() -> None:
    assert run_ranks(compiled, 2, timeout_s=200) == [(0, 1, 0)] * 2


def test_the_compiler_is_told_the_shapes_and_types_of_the_results() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(BATCH, SEQ, heads, HEAD_DIM, dtype=torch.bfloat16) for heads in (8, 2))
        pieces = torch.empty(8, len(pairs.Piece._fields), dtype=torch.int64)
        out, lse = ring.ring_attention(q, k, k, pieces, None, "any")
        grads = ring.ring_attention_backward(out, q, k, k, out, lse, pieces, None, "any")
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((BATCH, 8, SEQ), torch.float32)
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in (q, k, k)]


# Cutting, and what is refused.


def test_cutting_gives_every_token_to_one_process_and_agrees_between_numpy_and_torch() -> None:
    whole = np.arange(BATCH * SEQ).reshape(BATCH, SEQ)
    for method, world in (("ring", 3), ("all_to_all", 4), ("ring", 1)):
        parts = []
        for rank in range(world):
            place = Place(rank, world, CPU, Sizes(cp=world))
            part = context.cut(whole, place, method)  # type: ignore[arg-type]
            assert np.array_equal(part, context.cut(torch.from_numpy(whole), place, method).numpy())  # type: ignore[arg-type]
            parts.append(part)
        assert np.array_equal(np.sort(np.concatenate(parts, axis=1)), whole)


def test_what_cannot_be_cut_is_refused_in_one_sentence() -> None:
    place = Place(0, 4, CPU, Sizes(cp=4))
    with pytest.raises(SpecError, match=r"no multiple of 8.* set it to 16"):
        context.cut(np.zeros((1, 12)), place, "ring")
    with pytest.raises(SpecError, match=r"2 key and value heads .* set mesh.cp_method to ring"):
        context.split(decoder(), place, "all_to_all")
    dynamic = replace(SHAPE, rope_scaling=RopeScaling(kind="dynamic", factor=2.0))
    with pytest.raises(SpecError, match=r"dynamic"):
        context.split(Decoder(dynamic), place, "ring")


def test_alone_nothing_is_split() -> None:
    model = decoder()
    context.split(model, Place(0, 1, CPU), "ring")
    assert model.mask is attention_mask
