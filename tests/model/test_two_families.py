"""Gemma 3 and DeepSeek-V3: facts beside the modules, what tensor parallelism truly cuts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from shoal.decide.checks import trainable
from shoal.errors import SpecError
from shoal.model.decoder import Block, Decoder
from shoal.parallel.build import build
from shoal.parallel.place import lay_out
from shoal.plan.net import Net
from shoal.spec import Run
from shoal.spec.eight_bits import check
from shoal.spec.flops import seen_pairs
from shoal.spec.mesh import Sizes
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of
from tests.plan.runs import closed
from tests.ranks import run_ranks
from tests.train.matrix import MODELS

GEMMA: dict[str, Any] = {**MODELS["gemma3"], "vocab_size": 40, "layers": 3}
DEEPSEEK: dict[str, Any] = {**MODELS["deepseek"], "vocab_size": 40, "layers": 2}
BIASES = {"qkv_bias": True, "out_bias": True}
NO_RANK: dict[str, Any] = {**DEEPSEEK, **BIASES, "mla": {**DEEPSEEK["mla"], "q_lora_rank": None}}
ALL = {"gemma3": GEMMA, "deepseek": DEEPSEEK, "deepseek, queries of the stream": NO_RANK}


def shape(made: dict[str, Any], **changes: Any) -> Shape:
    return shape_of(Model(**{**made, **changes}))


@pytest.mark.parametrize("name", ALL)
def test_the_planner_counts_what_is_built(name: str) -> None:
    of = shape(ALL[name])
    model = Decoder(of)
    for layer, block in enumerate(model.blocks.values()):
        assert isinstance(block, Block)
        listed = {weight.name: weight.dims for weight in of.mixer_weights(layer)}
        assert listed == {name: tuple(p.shape) for name, p in block.mixer.named_parameters()}
    assert of.params == sum(p.numel() for p in model.parameters())
    small = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert Net.of(of).params == pytest.approx(of.params - small, rel=1e-12)
    seen = of.flops_per_token(64, causal=True)
    assert Net.of(of).flops_per_token(64, causal=True) == pytest.approx(seen, rel=1e-12)


def test_tensor_parallelism_truly_cuts_all_but_norms_routers_and_what_makes_short_vectors() -> None:
    runs = {name: closed(made, **{"mesh.tp": 2, "data.seq_len": 16}) for name, made in ALL.items()}

    def rank(rank: int, world: int) -> dict[str, tuple[int, int]]:
        found = {}
        for name, run in runs.items():
            place = lay_out(rank, world, torch.device("cpu"), Sizes.of(run.mesh), run.model.experts is not None)
            laid = build(run, place)
            cut, whole = 0, 0
            for parameter_name, held in laid.decoders[0].named_parameters():
                assert isinstance(held, DTensor)
                here, all_of_it = held.to_local().numel(), held.numel()
                split = any(isinstance(placement, Shard) for placement in held.placements)
                assert here * (world if split else 1) == all_of_it, parameter_name
                cut, whole = cut + split * all_of_it, whole + (not split) * all_of_it
            for layer, block in enumerate(laid.decoders[0].blocks.values()):
                assert isinstance(block, Block)
                for weight in laid.shape.mixer_weights(layer):
                    assert block.mixer.get_parameter(weight.name).to_local().shape == weight.local(world), weight
            found[name] = cut, whole
        return found

    found = run_ranks(rank, 2)[0]
    for name, made in ALL.items():
        of = shape(made)
        whole = of.dim * (1 + of.layers * of.norms)
        whole += sum(w.numbers for layer in range(of.layers) for w in of.mixer_weights(layer) if w.cut is None)
        whole += sum(of.sparse(layer) for layer in range(of.layers)) * of.dim * (of.experts.count if of.experts else 0)
        assert found[name] == (of.params - whole, whole)
        assert whole < 0.12 * of.params


def test_a_window_is_in_the_layers_that_the_pattern_names() -> None:
    of = shape(GEMMA, layers=7, full_attention_every=3)
    assert [layer for layer in range(7) if not of.slides(layer)] == [2, 5]
    lengths = torch.tensor([20]).numpy()
    window = of.sliding_window or 0
    sliding = window * (window + 1) // 2 + (20 - window) * window
    assert seen_pairs(of, lengths) == 2 * 20 * 21 // 2 + 5 * sliding


def run_of(made: dict[str, Any], **changes: Any) -> Run:
    spec: dict[str, Any] = {"name": "x", "model": made, "data": {"train": ["x"]}, "train": {"steps": 9, "batch": 4}}
    for name, value in changes.items():
        section, key = name.split("__")
        spec[section] = {**spec.get(section, {}), key: value}
    return Run.model_validate(spec)


MLA, EXPERTS = DEEPSEEK["mla"], DEEPSEEK["experts"]


@pytest.mark.parametrize(
    ("made", "changes", "said"),
    [
        (
            GEMMA,
            {"model__sliding_rope_theta": None, "model__rope_scaling": {"kind": "linear", "factor": 8.0}},
            "model.rope_scaling of family gemma3_text is about layers without a window alone",
        ),
        (GEMMA, {"model__qk_norm": False}, "model.qk_norm false does not go with family gemma3_text"),
        (GEMMA, {"model__family": "qwen3"}, "family qwen3 has no model.full_attention_every (gemma3_text does)"),
        (
            GEMMA,
            {"model__sliding_window": None, "model__sliding_rope_theta": None},
            "about layers beside those with a model.sliding_window",
        ),
        (GEMMA, {"model__full_attention_layers": 1}, "both say which layers see all"),
        (GEMMA, {"model__mlp_bias": True}, "family gemma3_text has no model.mlp_bias"),
        (GEMMA, {"model__experts": EXPERTS}, "family gemma3_text has no model.experts"),
        (GEMMA, {"model__mla": MLA, "model__kv_heads": 8, "model__head_dim": 10}, "gemma3_text has no model.mla (deep"),
        (GEMMA, {"model__dim": 36}, "family gemma3_text needs a model.dim (36) that is a multiple of model.heads (8)"),
        (GEMMA, {"mesh__tp": 8}, "model.kv_heads 4 cannot be split over mesh.tp 8"),
        (DEEPSEEK, {"model__family": "dots1", "model__qk_norm": True}, "family dots1 has no model.experts.groups"),
        (DEEPSEEK, {"model__mla": None, "model__head_dim": 8}, "family deepseek_v3 needs model.mla"),
        (DEEPSEEK, {"model__experts": None}, "family deepseek_v3 needs model.experts"),
        (DEEPSEEK, {"model__head_dim": 8}, "model.head_dim 8 is not the 10 of"),
        (DEEPSEEK, {"model__kv_heads": 4}, "every head has keys of its own"),
        (DEEPSEEK, {"model__mla": {**MLA, "v_head_dim": 11}}, "v_head_dim 11 is more than the 10 of a query's head"),
        (DEEPSEEK, {"model__mla": {**MLA, "qk_rope_head_dim": 3}}, "qk_rope_head_dim 3 is odd"),
        (DEEPSEEK, {"model__sliding_window": 8}, "family deepseek_v3 has no model.sliding_window"),
        (DEEPSEEK, {"model__experts": {**EXPERTS, "groups": 3}}, "groups 3 does not divide model.experts.count 8"),
        (DEEPSEEK, {"model__experts": {**EXPERTS, "groups": 8}}, "leaves a group one expert"),
        (DEEPSEEK, {"model__experts": {**EXPERTS, "top_groups": 5}}, "is more than the groups there are, 4"),
        (DEEPSEEK, {"model__experts": {**EXPERTS, "top_groups": 1}}, "top_k 3 is more than the 2 experts of"),
        (DEEPSEEK, {"mesh__tp": 16}, "model.heads 8"),
        (
            DEEPSEEK,
            {"model__rope_scaling": {"kind": "linear", "factor": 2, "mscale_all_dim": 1}},
            "mscale_all_dim is for kind yarn with model.mla alone",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_sentence(
    made: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError) as refusal:
        trainable(run_of(made, **changes))
    assert said in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_eight_bits_and_stages_are_refused_for_latent_attention() -> None:
    with pytest.raises(SpecError, match=r"fp8 does not compute the layers of model\.mla yet: take bf16"):
        check(shape(DEEPSEEK), tensor_parallel=False)
    with pytest.raises(SpecError, match=r"has no effect in a model cut over peers"):
        trainable(run_of(DEEPSEEK), "stages")


def test_a_centred_norm_begins_as_one() -> None:
    model = Decoder(shape(GEMMA))
    model.init_weights(1)
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight")]
    assert len(norms) == 3 * 6 + 1
    assert not any(p.any() for p in norms)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(model.norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
