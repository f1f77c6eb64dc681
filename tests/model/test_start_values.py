"""Start values: each rule's numbers have the deviations that the guide's table states, `normal` the bits of before."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch

from shoal.model import fp8, init
from shoal.model.decoder import Decoder
from shoal.parallel.build import build
from shoal.parallel.place import lay_out
from shoal.spec.mesh import Sizes
from shoal.spec.model import Model
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.spec.start_values import RULES
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

DIM, LAYERS, FFN, EXPERT, STD = 64, 3, 160, 96, 0.05
SIZES = {"vocab_size": 512, "dim": DIM, "layers": LAYERS, "heads": 2, "ffn_dim": FFN}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_embeddings": True},
    "experts": {
        "family": "dots1",
        "qk_norm": True,
        "experts": {"count": 4, "top_k": 2, "ffn_dim": EXPERT, "shared": 1, "dense_layers": 1, "score": "sigmoid"},
    },
}


def begun(init: str, kind: str, seed: int = 5, std: float | None = None) -> Decoder:
    stated = {} if std is None else {"init_std": std}
    model = Decoder(shape_of(Model.model_validate({**SIZES, **KINDS[kind], **stated, "init": init})))
    model.init_weights(seed)
    return model


def stated(rule: str, name: str, tied: bool) -> float:
    """The guide's table, written once more."""
    parts = name.removesuffix(".weight").split(".")
    last, layer = parts[-1], int(parts[1]) if parts[0] == "blocks" else 0
    writes = last in ("out", "down")
    inputs = {"out": DIM, "down": EXPERT if "experts" in parts or "shared" in parts else FFN}.get(last, DIM)
    ends = last in ("embed", "head")
    if rule == "normal":
        return STD
    if rule == "megatron":
        return STD / math.sqrt(2 * LAYERS) if writes else STD
    if ends:
        return 1.0 if last == "embed" and not tied else DIM**-0.5
    if rule == "torchtitan":
        return STD if last in ("q", "k", "v", "gate") else STD / math.sqrt(2 * (layer + 1))
    if writes and rule == "zero":
        return 0.0
    if writes:
        return (DIM**-0.5 if tied else 1.0) / math.sqrt(2 * LAYERS * inputs)
    return inputs**-0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_every_matrix_has_the_deviation_of_the_table(rule: str, kind: str) -> None:
    model = begun(rule, kind, std=STD if rule in ("normal", "megatron", "torchtitan") else None)
    seen = set()
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        want = stated(rule, name, kind == "tied")
        seen.add(name.removesuffix(".weight").split(".")[-1])
        for matrix in p.detach() if p.ndim == 3 else [p.detach()]:  # each expert by itself
            close = 5 / math.sqrt(matrix.numel())  # seven times what chance does, and the cut takes 1.3%
            assert matrix.std().item() == pytest.approx(want, rel=close + 0.015, abs=1e-12), name
            assert abs(matrix.mean().item()) <= 5 * want / math.sqrt(matrix.numel()), name
    assert seen >= {"embed", "q", "k", "v", "out", "gate", "up", "down"}
    assert ("router" in seen) == (kind == "experts")
    assert ("head" in seen) == (kind != "tied")


@pytest.mark.parametrize(("kind", "which"), [("dense", "head.weight"), ("tied", "embed.weight")])
def test_torchtitans_output_layer_is_cut_at_three_deviations_and_no_other(kind: str, which: str) -> None:
    for name, p in begun("torchtitan", kind).named_parameters():
        if p.ndim == 2 and p.numel() >= 512 * DIM:
            furthest = p.detach().abs().max().item() / p.detach().std().item()
            assert (furthest < 3.1) == (name == which), name


@pytest.mark.parametrize(
    ("digest", "more"),
    [
        ("32e15c868a626901", {}),
        (
            "aa52ed63744d939e",
            {"tie_embeddings": True, "family": "mixtral", "experts": {"count": 4, "top_k": 2, "ffn_dim": 24}},
        ),
    ],
    ids=["dense", "tied experts"],
)
def test_normal_draws_the_bits_that_runs_began_with_before_there_were_rules(digest: str, more: dict[str, Any]) -> None:
    sizes = {"vocab_size": 101, "dim": 32, "layers": 2, "heads": 2, "ffn_dim": 48}
    model = Decoder(shape_of(Model.model_validate({**sizes, **more, "init": "normal"})))
    model.init_weights(5)
    found = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        found.update(name.encode() + p.detach().numpy().tobytes())
    assert found.hexdigest()[:16] == digest


@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_a_token_is_still_heard_in_the_last_layer_unless_all_matrices_are_alike(kind: str) -> None:
    """Why `normal` learns slowly: its blocks write over an embedding of 0.02."""
    tokens = torch.arange(48)[None] % 512

    def heard(rule: str) -> float:
        model = begun(rule, kind)
        with torch.no_grad():
            model.norm = torch.nn.Identity()  # type: ignore[assignment]  # the residual stream as it is
            return float(torch.cosine_similarity(model.hidden(tokens), model.embed(tokens), dim=-1).mean())

    assert heard("zero") == pytest.approx(1.0)
    assert heard("scaled") > 0.6
    assert heard("torchtitan") > heard("normal")


def test_blocks_that_begin_by_adding_nothing_learn_in_8_bits_too() -> None:
    """A matrix of zeros has no largest number to scale by."""
    model = begun("zero", "dense")
    fp8.apply(model, torch.device("cpu"), head=True)
    tokens = torch.arange(64).view(2, 32)
    model(tokens, targets=tokens.roll(-1, 1)).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in grads.values())
    moved = grads["blocks.0.attention.out.weight"]
    assert moved is not None
    assert moved.abs().max() > 0


MESHES = {
    "pp 2 x tp 2": ("dense", {"pp": 2, "tp": 2}),
    "pp 2 x dp_shard 2, tied": ("tied", {"pp": 2, "dp_shard": 2}),
    "dp_shard 2 x tp 2 with ep 4": ("experts", {"dp_shard": 2, "tp": 2, "ep": 4}),
    "dp_shard 4 with ep 2": ("experts", {"dp_shard": 4, "ep": 2}),
}


def run_of(rule: str, mesh: str) -> Run:
    kind, axes = MESHES[mesh]
    whole = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
    return Run.model_validate(
        {
            "name": "a",
            "seed": 7,
            "model": {**SIZES, **KINDS[kind], "init": rule},
            "data": {"train": "/x", "seq_len": 16},
            "train": {"steps": 1, "batch": 8, "precision": "fp32", "kernels": "plain"},
            "mesh": {**whole, **axes, "micro_batch": 1, "schedule": "1f1b", "recompute": "none"},
        }
    )


def test_every_process_of_every_mesh_holds_its_part_of_the_same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_NUMBERS", 1500)  # several generators a matrix

    seed = run_of("normal", next(iter(MESHES))).seed
    starts = {(r, k): dict(begun(r, k, seed=seed).named_parameters()) for r in RULES for k in KINDS}  # before the fork

    def work(rank: int, world: int) -> tuple[int, list[str]]:
        compared, wrong, rules = 0, [], list(RULES)
        for i, (mesh, (kind, _)) in enumerate(MESHES.items()):
            sizes = Sizes.of(run_of("normal", mesh).mesh)
            place = lay_out(rank, world, torch.device("cpu"), sizes, experts=kind == "experts")
            for rule in (rules[i % len(rules)], rules[(i + 1) % len(rules)]):  # each on some, two on each
                run = run_of(rule, mesh)
                whole = starts[rule, kind]
                for name, p in (
                    (n, p) for decoder in build(run, place).decoders for n, p in decoder.named_parameters()
                ):
                    local, box = init.local_box(p.detach())
                    compared += 1
                    if not torch.equal(local, whole[name].detach()[box]):
                        wrong.append(f"{mesh}, {rule}: {name}")
        return compared, wrong

    for compared, wrong in run_ranks(work, 4):
        assert not wrong
        assert compared > 20 * len(MESHES) * 2 / 2
