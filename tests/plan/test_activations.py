"""What blocks keep for the backward pass is what the plan says: counted on live tensors of the real model."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.windows import Batch
from shoal.parallel.build import build
from shoal.parallel.place import lay_out
from shoal.plan import activations
from shoal.spec.mesh import Sizes
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from tests.plan.live import Live, plain
from tests.plan.runs import closed
from tests.ranks import run_ranks

MODES = ("none", "selective", "attention", "full")
DENSE = {"dim": 128, "heads": 4, "kv_heads": 2, "ffn_dim": 384}
EXPERTS = {"count": 4, "top_k": 2, "ffn_dim": 192, "shared": 1}
MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
KINDS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "qk_norm": {**DENSE, "qk_norm": True, "head_dim": 64},
    "experts": {**DENSE, "experts": EXPERTS},
    "gemma3": {**DENSE, "family": "gemma3_text", "qk_norm": True, "head_dim": 64, "query_pre_attn_scalar": 100},
    "mla": {**DENSE, "kv_heads": "auto", "mla": {**MLA, "q_lora_rank": 96}},
    "mamba": {**DENSE, "family": "bamba", "mamba": {"attention_layers": (), "heads": 8, "state_dim": 32}},
}


def kept_by_a_layer(run: Run, packed: bool = True, rank: int = 0, world: int = 1) -> float:
    """Bytes that are alive between forward and backward with one layer more, but for the weights."""
    alive = []
    for layers in (1, 2):
        longer = run.model_copy(update={"model": run.model.model_copy(update={"layers": layers})})
        place = lay_out(rank, world, torch.device("cpu"), Sizes.of(run.mesh), run.model.experts is not None)
        laid = build(longer, place)
        with Live(*(p for _, p in laid.named_parameters())) as live:
            loss = laid.module(*laid._inputs(batch(run, packed)))
        weights = sum(plain(p).numel() for n, p in laid.named_parameters() if n.startswith("blocks") and p.ndim >= 2)
        # Autocast's and fp8's, which are counted with the weights.
        casts = {"bf16": 2, "fp8": 1}.get(run.train.precision, 0) if run.mesh.recompute == "none" else 0
        alive.append(live.bytes - casts * weights)
        del loss
    return alive[1] - alive[0]


def batch(run: Run, packed: bool) -> Batch:
    shape = (int(run.mesh.micro_batch), run.data.seq_len)
    tokens = np.random.default_rng(0).integers(0, int(run.model.vocab_size), shape)
    positions = np.broadcast_to(np.arange(shape[1]), shape)
    return Batch(tokens, tokens, positions, positions * 3 // shape[1] if packed else np.zeros_like(positions))


@pytest.mark.parametrize(
    ("kind", "precision", "mode"),
    [*product(KINDS, ("fp32", "bf16"), MODES), *product(("dense", "qk_norm"), ("fp8", "fp8 row"), ("none",))],
)
def test_a_block_keeps_what_the_plan_says(kind: str, precision: str, mode: str) -> None:
    precision, scaling = (*precision.split(), "tensor")[:2]
    run = closed(KINDS[kind], **{"train.precision": precision, "train.fp8_scaling": scaling, "mesh.recompute": mode})
    planned = activations.block(run, shape_of(run.model), layer=1).of(mode)
    # With so few tokens the scale of each input (4 bytes, once a micro-batch) is seen.
    rel = 0.05 if kind == "mamba" else 0.03 if scaling == "tensor" else 0.04
    assert kept_by_a_layer(run) == pytest.approx(planned, rel=rel)


def test_a_state_space_keeps_more_where_states_travel_between_chunks() -> None:
    run = closed(KINDS["mamba"], **{"data.seq_len": 384})
    planned = activations.block(run, shape_of(run.model), layer=1).none
    assert kept_by_a_layer(run) == pytest.approx(planned, rel=0.05)


def test_without_documents_to_keep_apart_there_is_no_mask_to_keep() -> None:
    run = closed(DENSE, **{"data.mask_documents": False})
    planned = activations.block(run, shape_of(run.model), layer=1).none
    assert kept_by_a_layer(run, packed=False) == pytest.approx(planned, rel=0.03)


def test_on_a_gpu_documents_are_told_apart_without_a_matrix() -> None:
    """Of 128k tokens it would be 17 GB. Torch's own kernels need it all the same."""
    gpu = {"resources.device": "cuda", "train.precision": "bf16", "data.seq_len": 131072}
    fast, plain_kernels = (closed(DENSE, **gpu, **{"train.kernels": kernels}) for kernels in ("auto", "plain"))
    of_fast, of_plain = (activations.shared_by_blocks(run, shape_of(run.model)) for run in (fast, plain_kernels))
    assert of_plain - of_fast == 2 * 131072**2
    blocks = [activations.block(run, shape_of(run.model), layer=1).none for run in (fast, plain_kernels)]
    assert blocks[1] - blocks[0] == 2 * 131072 * 2 * 131072


@pytest.mark.slow
def test_shared_between_processes_a_block_keeps_what_the_plan_says() -> None:
    meshes: list[tuple[str, dict[str, Any]]] = [
        ("dense", {"mesh.tp": 2}),
        ("dense", {"mesh.tp": 2, "train.precision": "bf16"}),
        ("dense", {"mesh.cp": 2, "mesh.cp_method": "ring"}),
        ("dense", {"mesh.cp": 2, "mesh.cp_method": "all_to_all"}),
        ("experts", {"mesh.tp": 2, "mesh.ep": 2}),
        ("mamba", {"mesh.tp": 2}),
        ("mla", {"mesh.tp": 2}),
    ]
    # Where all is recomputed a block's input is kept, and that is divided as it is elsewhere: once is enough. And what
    # a number takes in 16 bits, or a block of each kind when something of it is recomputed, is tested of one process.
    modes = [MODES, *[MODES[:1]] * (len(meshes) - 1)]
    cases = [
        closed(KINDS[kind], **mesh, **{"mesh.recompute": mode})
        for (kind, mesh), some in zip(meshes, modes, strict=True)
        for mode in some
    ]

    def rank(rank: int, world: int) -> list[float]:
        return [kept_by_a_layer(run, rank=rank, world=world) for run in cases]

    measured = run_ranks(rank, 2, timeout_s=120)[0]
    planned = [activations.block(run, shape_of(run.model), layer=1).of(str(run.mesh.recompute)) for run in cases]
    off = {f"{run.mesh}": (m, p) for run, m, p in zip(cases, measured, planned, strict=True) if abs(m / p - 1) > 0.05}
    assert not off, off


def test_a_window_is_masked_whichever_layers_have_it() -> None:
    """The last may be one that sees all."""
    gemma = {**KINDS["gemma3"], "layers": 6, "max_seq_len": 4096, "sliding_window": 512, "sliding_rope_theta": 1e4}
    about = {"data.seq_len": 4096, "data.mask_documents": False}
    runs = [closed({**gemma, "full_attention_every": every}, **about) for every in (5, 6)]
    kept = [activations.shared_by_blocks(run, shape_of(run.model)) for run in runs]
    assert kept[0] == kept[1] > 4096**2
