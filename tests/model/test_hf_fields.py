"""Every field of transformers' own configs has a verdict here: a new transformers that adds one fails these tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers
from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shoal.errors import SpecError
from shoal.spec.families import FAMILIES
from shoal.spec.families.verdicts import READ, Harmless, Only
from shoal.spec.hf.config import from_hf
from shoal.spec.hf.fields import FIELDS, ROPE_FIELDS
from tests.model.test_hf_config import config

KNOWN = sorted(FAMILIES)


def theirs(kind: str) -> Any:
    return CONFIG_MAPPING[kind]


@pytest.mark.parametrize("kind", KNOWN)
def test_every_field_of_the_class_is_read_fixed_or_known_to_be_harmless(kind: str) -> None:
    fields = {field.name for field in dataclasses.fields(theirs(kind))} | set(theirs(kind).attribute_map)
    written = set(theirs(kind)().to_dict())
    assert fields | written <= set(FIELDS[kind])


def test_what_transformers_takes_for_settings_of_generation_is_harmless() -> None:
    generation = set(GenerationConfig._get_default_generation_params())
    assert all(isinstance(FIELDS["llama"].get(name), Harmless) for name in generation)


def test_every_key_of_rope_that_transformers_names_is_known() -> None:
    named = set(transformers.modeling_rope_utils.RopeParameters.__annotations__)
    refused = {"short_factor", "long_factor", "mrope_section"}  # of kinds of RoPE that Shoal does not compute
    assert named - refused <= set(ROPE_FIELDS)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_value_that_is_taken_where_others_are_not_is_the_default_of_the_class(kind: str) -> None:
    """Else a folder that leaves the field out would be refused, or taken for something else."""
    for field in dataclasses.fields(theirs(kind)):
        verdict = FIELDS[kind][field.name]
        if isinstance(verdict, Only):
            assert field.default is None or field.default in verdict.values, field.name


@pytest.mark.parametrize("kind", KNOWN)
def test_what_a_config_leaves_out_is_the_default_of_the_class(kind: str) -> None:
    needed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1} if kind == "dots1" else {}
    whole = {n: v for n, v in theirs(kind)().to_dict().items() if n != "model_type"}
    short = config(kind, **needed)
    kept = {n: v for n, v in short.items() if n != "model_type"}
    long = config(kind, **{**whole, **kept})
    for made in ("head_dim", "num_key_value_heads", "layer_types", "mamba_d_head"):
        # What the class makes of others is not a default.
        if next((f.default for f in dataclasses.fields(theirs(kind)) if f.name == made), None) in (None, "auto"):
            long.pop(made, None)
    assert from_hf(long) == from_hf(short)


@pytest.mark.parametrize("kind", KNOWN)
def test_harmless_is_said_in_one_word_and_what_is_read_is_read(kind: str) -> None:
    assert all(" " not in v.why for v in FIELDS[kind].values() if isinstance(v, Harmless))
    seen: set[str] = set()

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            seen.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            seen.add(str(key))
            return super().__contains__(key)

    more: dict[str, Any] = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    if kind == "dots1":
        more |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    if kind.startswith("qwen"):
        more["use_sliding_window"] = True
    from_hf(Watched(config(kind, **more)))
    unread = {name for name, verdict in FIELDS[kind].items() if verdict == READ} - seen
    assert unread <= {"transformers_weights", "rope_parameters"}  # of who opens the files; the other spelling


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("llama", {"is_causal": False}, "is_causal False"),
        ("llama", {"foreign": 0}, "foreign 0, a field that Shoal does not know of model_type llama"),
        ("llama", {"foreign\x1b[31m" + "x" * 99: 1}, r"'foreign\x1b[31m"),
        ("llama", {"sliding_window": 8}, "sliding_window 8"),
        ("llama", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("llama", {"per_layer_config": {"0": {"sliding_window": 2}}}, "per_layer_config"),
        ("llama", {"auto_map": {"AutoConfig": "x.X"}}, "auto_map"),
        ("llama", {"hidden_dropout": 0.1}, "hidden_dropout 0.1"),
        ("llama", {"quantization_config": {}}, "quantization_config"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling: a str where an object belongs"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": None}}, "truncate"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}}, "truncate"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "foreign": 1}}, "foreign in its RoPE"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": True}}, "factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, "layer_types"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"num_local_experts": 4, "num_experts": 8}, "two names of one number"),
        ("qwen3_moe", {"num_local_experts": 4, "num_experts": 8}, "two names of one number"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("dots1", {"topk_group": 0}, "topk_group 0"),
        ("dots1", {"n_group": 2}, "n_group 2"),
        ("dots1", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(kind: str, fields: dict[str, Any], said: str) -> None:
    needed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1} if kind == "dots1" else {}
    with pytest.raises(SpecError) as refusal:
        from_hf(config(kind, **needed, **fields))
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_what_real_folders_carry_is_taken() -> None:
    """From folders on the hub, of Llama, SmolLM, Qwen, Mistral and their fine-tunes."""
    carried = {
        "_name_or_path": "x/y", "architectures": ["LlamaForCausalLM"], "attention_dropout": 0.1, "bos_token_id": 1,
        "eos_token_id": [2, 3], "pad_token_id": 2, "pretraining_tp": 2, "torch_dtype": "bfloat16", "use_cache": False,
        "transformers_version": "4.31.0", "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "max_sequence_length": 2048, "top_p": 0.6,
        "unsloth_version": "2024.9", "auto_map": {"AutoTokenizer": ["tok.T", None]}, "is_causal": True, "novel": None,
    }  # fmt: skip
    assert from_hf(config(**carried)) == from_hf(config())
