"""What a config.json says is understood, and what cannot be computed is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.errors import SpecError
from shoal.model.decoder import Decoder
from shoal.spec.hf.config import from_hf, to_hf
from shoal.spec.model import Experts, Model
from shoal.spec.presets import presets
from shoal.spec.shape import shape_of

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def config(kind: str = "llama", **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **BASE, **more}


def test_what_a_config_leaves_out_is_what_transformers_takes_for_granted() -> None:
    assert from_hf(config("llama"))["kv_heads"] == 4
    assert from_hf(config("mistral"))["kv_heads"] == 8
    assert from_hf(config("mistral"))["sliding_window"] == 4096
    assert from_hf(config("mistral", sliding_window=None))["sliding_window"] is None
    assert from_hf(config("qwen3"))["head_dim"] == 128
    assert from_hf(config("qwen2"))["head_dim"] == 16
    assert from_hf(config("qwen2", sliding_window=32))["sliding_window"] is None  # use_sliding_window is not set


def test_every_field_of_the_model_that_a_config_can_state_is_given() -> None:
    left = set(Model.model_fields) - set(from_hf(config()))
    assert left == {
        "preset",
        "weights",
        "hf",
        "hf_config",
        "init",
        "experts",
        "mamba",
        "mla",
        "full_attention_every",
        "sliding_rope_theta",
        "query_pre_attn_scalar",
    }  # from `experts` on of some families alone


def test_layer_types_say_where_the_window_begins() -> None:
    types = ["full_attention"] + ["sliding_attention"] * 3
    fields = from_hf(config("qwen3", use_sliding_window=True, sliding_window=8, layer_types=types))
    assert (fields["sliding_window"], fields["full_attention_layers"]) == (8, 1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_config_survives_the_way_there_and_back(kind: str) -> None:
    shape = shape_of(Model(**from_hf(config(kind, num_key_value_heads=2))))
    assert shape_of(Model(**from_hf(to_hf(shape)))) == shape


def test_every_preset_is_a_model_that_transformers_has_and_shoal_builds() -> None:
    shapes = {name: shape_of(Model(**preset.model), 4096) for name, preset in presets().items()}
    assert sum(shape.experts is not None for shape in shapes.values()) >= 3
    for name, shape in shapes.items():
        plain = replace(shape, init="normal")  # the rule of the start values is not in a config.json
        if shape.experts is not None:  # nor how a router is trained
            off = dict.fromkeys(("balance_rate", "balance_loss", "z_loss"), 0.0)
            plain = replace(plain, experts=shape.experts.model_copy(update=off))
        assert shape_of(Model(**from_hf(to_hf(shape)))) == plain, name
        with torch.device("meta"):
            model = Decoder(shape)
        assert sum(p.numel() for p in model.parameters()) == shape.params, name


def test_dynamic_rope_is_written_with_the_length_it_stretches_from() -> None:
    model = Model(**from_hf(config(max_position_embeddings=32, rope_scaling={"type": "dynamic", "factor": 2.0})))
    stretched = model.model_copy(
        update={
            "max_seq_len": 128,
            "rope_scaling": model.rope_scaling.model_copy(update={"original_max_seq_len": 32}),  # type: ignore[union-attr]
        }
    )
    assert to_hf(shape_of(stretched))["max_position_embeddings"] == 32


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (config("gpt2"), "model_type 'gpt2'"),
        ({}, "model_type None"),
        (config(hidden_size=None), "hidden_size"),
        (config(num_attention_heads=0), "num_attention_heads"),
        (config(hidden_act="gelu"), "hidden_act 'gelu'"),
        (config(quantization_config={"bits": 4}), "quantization_config"),
        (config(num_local_experts=8), "num_local_experts 8: transformers computes this family without experts"),
        (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}), "partial_rotary_factor"),
        (config(rope_scaling={"type": "longrope", "factor": 2.0}), "rope_type 'longrope'"),
        (config(rope_scaling={"rope_type": "linear"}), "factor"),
        (config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "truncate": False}), "truncate"),
        (config(rope_parameters={"full_attention": {"rope_type": "default"}}), "differ between layers"),
        (config("mistral", layer_types=["full_attention", "sliding_attention"] * 2), "layer_types"),
        (
            config("qwen2", use_sliding_window=True, layer_types=["sliding_attention", "full_attention"] * 2),
            "layer_types",
        ),
    ],
)
def test_a_config_that_shoal_cannot_compute_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refusal:
        from_hf(wrong)
    assert said in str(refusal.value)
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("llama", {"qk_norm": True}, "qk_norm"),
        ("qwen3", {"qk_norm": False}, "qk_norm"),
        ("llama", {"qkv_bias": True}, "out_bias"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias true"),
        ("mistral", {"out_bias": True}, "out_bias false"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("mistral", {"sliding_window": 8, "full_attention_layers": 1}, "full_attention_layers"),
        ("llama", {"dim": 66}, "multiple of model.heads"),
        ("llama", {"experts": Experts(count=2, top_k=1, ffn_dim=8)}, "experts"),
        ("llama", {"family": "gpt2"}, "gpt2"),
    ],
)
def test_a_shape_without_a_transformers_class_is_refused_by_name(kind: str, change: dict[str, Any], said: str) -> None:
    shape = shape_of(Model(**from_hf(config(kind, num_key_value_heads=2, head_dim=16))))
    to_hf(shape)
    with pytest.raises(SpecError) as refusal:
        to_hf(replace(shape, **change))
    assert said in str(refusal.value)
