"""Recomputation is the same computation: losses and gradients stay as they are, bit for bit, on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention

from shoal.data.windows import Batch
from shoal.model import documents
from shoal.model.decoder import Decoder
from shoal.parallel import recompute
from shoal.parallel.build import build
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place, lay_out
from shoal.spec.mesh import Sizes
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from tests.plan.live import Live, plain
from tests.plan.runs import closed
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

DENSE = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 96}
KINDS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "qk_norm and biases": {**DENSE, "qk_norm": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "sliding window": {**DENSE, "sliding_window": 8, "full_attention_layers": 1},
    "as wide as its attention": {**DENSE, "ffn_dim": 32},
    "experts": {**DENSE, "experts": {"count": 4, "top_k": 2, "ffn_dim": 32, "shared": 1, "dense_layers": 1}},
}
AGAIN: tuple[recompute.Mode, ...] = ("selective", "attention", "full")


def batches(run: Run, reader: int) -> list[Batch]:
    rows, seq = run.train.batch // Sizes.of(run.mesh).dp, run.data.seq_len
    tokens = np.random.default_rng(reader).integers(0, int(run.model.vocab_size), (rows, seq))
    positions = np.broadcast_to(np.arange(seq), tokens.shape)
    whole = [tokens, np.roll(tokens, -1, 1), positions, positions * 3 // seq]
    micro = int(run.mesh.micro_batch)
    return [Batch(*(a[i : i + micro] for a in whole)) for i in range(0, rows, micro)]


def step(run: Run, place: Place) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and this process's gradients."""
    laid = build(run, place)
    return float(laid.backward(batches(run, place.at["dp"]))), gradients(laid)


def gradients(laid: Laid) -> dict[str, np.ndarray]:
    grads = {name: p.grad for name, p in laid.named_parameters() if p.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).numpy() for name, g in grads.items()}


def same(one: tuple[float, dict[str, np.ndarray]], other: tuple[float, dict[str, np.ndarray]]) -> bool:
    return one[0] == other[0] and all(np.array_equal(one[1][name], g) for name, g in other[1].items())


def alone() -> Place:
    return Place(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_bitwise_those_without_recomputation(kind: str, precision: str) -> None:
    kept, *again = (
        step(closed(KINDS[kind], **{"train.precision": precision, "mesh.recompute": mode}), alone())
        for mode in ("none", *AGAIN)
    )
    assert len(kept[1]) > 30
    assert all(same(kept, other) for other in again)


MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("dense", {"mesh.dp_replicate": 2}),
    "FSDP2": ("dense", {"mesh.dp_shard": 2}),
    "FSDP2 in bf16": ("dense", {"mesh.dp_shard": 2, "train.precision": "bf16"}),
    "tensor": ("dense", {"mesh.tp": 2}),
    "ring": ("dense", {"mesh.cp": 2, "mesh.cp_method": "ring"}),
    "all_to_all": ("dense", {"mesh.cp": 2, "mesh.cp_method": "all_to_all"}),
    "experts": ("experts", {"mesh.dp_shard": 2, "mesh.ep": 2}),
    "experts under tensor": ("experts", {"mesh.tp": 2, "mesh.ep": 2}),
    "1f1b": ("dense", {"mesh.pp": 2}),
    "zbv": ("dense", {"mesh.pp": 2, "mesh.schedule": "zbv"}),
}


@pytest.mark.slow
def test_on_every_mesh_too() -> None:
    """Collectives inside a block run again in the backward pass, on all processes alike, or not at all."""

    def rank(rank: int, world: int) -> dict[str, list[bool]]:
        results = {}
        for name, (kind, mesh) in MESHES.items():
            runs = [closed(KINDS[kind], **{"train.batch": 8, **mesh, "mesh.recompute": m}) for m in ("none", *AGAIN)]
            place = lay_out(rank, world, torch.device("cpu"), Sizes.of(runs[0].mesh), kind == "experts")
            kept, *again = (step(run, place) for run in runs)
            results[name] = [same(kept, other) for other in again]
        return results

    for results in run_ranks(rank, 2, timeout_s=200):
        assert results == {name: [True] * len(AGAIN) for name in MESHES}


def test_parameters_and_modules_keep_their_names() -> None:
    run = closed(DENSE)
    before, after = Decoder(shape_of(run.model)), Decoder(shape_of(run.model))
    recompute.apply(after, "selective")
    assert [n for n, _ in after.named_parameters()] == [n for n, _ in before.named_parameters()]
    assert [n for n, _ in after.named_modules()] == [n for n, _ in before.named_modules()]
    assert after.state_dict().keys() == before.state_dict().keys()


def test_a_forward_pass_without_gradients_keeps_nothing() -> None:
    laid = build(closed(DENSE, **{"mesh.recompute": "selective"}), alone())
    with Live(*(p for _, p in laid.named_parameters())) as live, torch.no_grad():
        loss = laid.module(*laid._inputs(batches(closed(DENSE), 0)[0]))
    assert live.bytes < 64 + loss.nbytes


def compiled(run: Run, place: Place) -> tuple[float, int]:
    """The loss, and the bytes that the blocks' graphs have saved for the backward pass."""
    torch._dynamo.reset()
    laid = build(run, place)
    for block in laid.decoders[0].blocks.values():
        # The partitioner, which decides what is kept, is inductor's; generating code would only take longer.
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    weights = {plain(p.detach()).untyped_storage().data_ptr() for _, p in laid.named_parameters()}
    storages = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = plain(t).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = laid.module(*laid._inputs(batches(run, 0)[0]))
    loss.backward()
    return float(loss.detach()), sum(size for at, size in storages.items() if at not in weights)


@pytest.mark.slow
def test_compiled_blocks_recompute_without_a_break_in_the_graph_and_keep_less() -> None:
    """In forked processes: one that has compiled can have no children that do."""
    one_layer = {**DENSE, "layers": 1}

    def alone_rank(rank: int, world: int) -> list[tuple[float, int]]:
        return [compiled(closed(one_layer, **{"mesh.recompute": mode}), alone()) for mode in ("none", *AGAIN)]

    def tensor_rank(rank: int, world: int) -> float:
        run = closed(one_layer, **{"mesh.recompute": "full", "mesh.tp": 2})  # which torch itself cannot compile
        return compiled(run, lay_out(rank, world, torch.device("cpu"), Sizes.of(run.mesh)))[0]

    losses, saved = zip(*run_ranks(alone_rank, 1, timeout_s=120)[0], strict=True)
    assert all(more > 1.15 * less for more, less in pairwise(saved)), saved
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert run_ranks(tensor_rank, 2, timeout_s=120) == pytest.approx([losses[0]] * 2, rel=1e-5)


def among_documents(mode: recompute.Mode) -> tuple[int, np.ndarray]:
    """How often the backward pass of a compiled block computes attention among packed documents, and a gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    decoder = Decoder(shape_of(closed({**DENSE, "dim": 64}).model))
    documents.apply(decoder)
    recompute.apply(decoder, mode)
    graphs: dict[str, list[str]] = {}

    def keep(name: str) -> Callable[[torch.fx.GraphModule, Any], Any]:
        def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs[name] = [str(node.target) for node in graph.graph.nodes]
            return make_boxed_func(graph.forward)

        return compiler

    block, x = decoder.blocks["0"], torch.randn(1, 256, 64, requires_grad=True)
    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=min_cut_rematerialization_partition
    )
    block.compile(backend=backend)
    apart = decoder.mask(torch.arange(256)[None] // 100, 256, None, torch.device("cpu"))
    block(x, (*decoder.rope(torch.arange(256)[None]), apart)).square().sum().backward()
    assert "flex_attention" in graphs["forward"]
    assert x.grad is not None
    return graphs["backward"].count("flex_attention"), x.grad.numpy()


def test_only_full_recomputation_computes_attention_among_documents_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch refuses its gradients on a processor, as it has no kernel for them there; its graphs it can make and run.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)

    def rank(rank: int, world: int) -> list[tuple[int, np.ndarray]]:
        return [among_documents(mode) for mode in ("none", *AGAIN)]

    (told,) = run_ranks(rank, 1, timeout_s=120)
    assert [times for times, _ in told] == [0, 0, 0, 1]
    for _, gradient in told[1:]:
        np.testing.assert_allclose(gradient, told[0][1], rtol=1e-5, atol=1e-5)
