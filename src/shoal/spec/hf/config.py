"""A Hugging Face config.json to the fields of `model` and back, for every family of `shoal.spec.families`.

Both ways refuse, with a sentence that names it, whatever the other side cannot express: a model that silently
computes something else is worse than none. A key that a config leaves out means what transformers 5 takes it to mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.spec.families import FAMILIES, Family
from shoal.spec.hf.experts import experts_from_hf, experts_problem, experts_to_hf
from shoal.spec.hf.fields import refuse_the_unknown
from shoal.spec.hf.mamba import mamba_from_hf, mamba_problem, mamba_to_hf
from shoal.spec.hf.mla import mla_from_hf, mla_problem, mla_to_hf
from shoal.spec.hf.numbers import MOST_HEADS, MOST_LAYERS, MOST_POSITIONS, MOST_TOKENS, MOST_WIDE, flag, real, whole
from shoal.spec.hf.rope import rope_from_hf, rope_to_hf, sliding_theta_from_hf
from shoal.spec.hf.windows import window_from_hf, window_to_hf
from shoal.spec.shape import Shape
from shoal.spec.start_values import STD
from shoal.values import BadValue, inside, shown

# How transformers spells an activation; the first is written.
ACTS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh", "gelu_python_tanh")}


def from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `shoal.spec.model.Model` that a config.json states. SpecError, in one sentence, where it says what
    Shoal does not know or cannot compute. `shoal.spec.hf.folder` asks the rules of a run file besides."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known, said = ", ".join(FAMILIES), repr(kind) if kind is None else repr(shown(kind))
        raise SpecError(f"config.json has model_type {said}, which Shoal does not know: it reads {known}.")
    try:
        with inside("config.json"):
            refuse_the_unknown(config, kind)
            return _read(config, kind, FAMILIES[kind])
    except BadValue as e:
        raise SpecError(f"{e}.") from None


def _read(config: Mapping[str, Any], kind: str, family: Family) -> dict[str, Any]:
    spellings = ACTS[family.act]
    act = config.get(family.act_key) or spellings[0]
    if act not in spellings:
        raise SpecError(
            f"config.json has {family.act_key} {shown(act)!r}: Shoal's feed-forward layers are gated by {spellings[0]} "
            "in this family."
        )
    dim = whole(config, "hidden_size", MOST_WIDE)
    layers = whole(config, "num_hidden_layers", MOST_LAYERS)
    heads = whole(config, "num_attention_heads", MOST_HEADS)
    kv_heads = family.kv_heads if "num_key_value_heads" not in config else None
    head_dim = family.head_dim if "head_dim" not in config else None
    max_seq_len = whole(config, "max_position_embeddings", MOST_POSITIONS, family.max_position)
    windows = window_from_hf(config, kind, family, layers)
    bias = flag(config, "attention_bias") if family.attention_bias else False
    fields = {
        "family": kind,
        "vocab_size": whole(config, "vocab_size", MOST_TOKENS),
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": whole(config, "num_key_value_heads", MOST_HEADS, kv_heads or heads),
        "head_dim": whole(config, "head_dim", MOST_WIDE, head_dim or max(dim // heads, 1)),
        "ffn_dim": whole(config, "intermediate_size", MOST_WIDE),
        "max_seq_len": max_seq_len,
        "norm_eps": real(config, "rms_norm_eps", family.norm_eps),
        **rope_from_hf(config, max_seq_len, family),
        "qk_norm": family.qk_norm,
        "qkv_bias": family.biases[0] if family.biases else bias,
        "out_bias": family.biases[1] if family.biases else bias,
        "mlp_bias": flag(config, "mlp_bias") if family.mlp_bias else False,
        "tie_embeddings": flag(config, "tie_word_embeddings", family.tied),
        **windows,
        "init_std": real(config, "initializer_range", STD) or STD,
    }
    if family.sliding_theta is not None:
        sliding = sliding_theta_from_hf(config, family.sliding_theta)
        fields["sliding_rope_theta"] = None if windows["sliding_window"] is None else sliding
    if family.query_scalar is not None:
        fields["query_pre_attn_scalar"] = whole(config, "query_pre_attn_scalar", MOST_WIDE, family.query_scalar)
    if family.mamba:
        fields["mamba"] = mamba_from_hf(config, dim, layers)
    if family.mla is not None:
        fields |= {"mla": mla_from_hf(config, family.mla), "head_dim": "auto"}
    return fields | {"experts": experts_from_hf(config, family.routed, layers)} if family.routed else fields


def to_hf(shape: Shape) -> dict[str, Any]:
    """The config.json that makes transformers (4 and 5) compute what Shoal's decoder of this shape computes."""
    if shape.family not in FAMILIES:
        raise SpecError(f"model.family {shape.family!r} is none of {', '.join(FAMILIES)}: choose one of them.")
    family = FAMILIES[shape.family]
    _refuse_the_inexpressible(shape, family)
    scaling = shape.rope_scaling
    max_position = shape.max_seq_len
    if scaling is not None and scaling.kind == "dynamic":  # transformers stretches from this length, and no other
        max_position = scaling.original_max_seq_len or shape.max_seq_len
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        family.act_key: ACTS[family.act][0],
        "max_position_embeddings": max_position,
        "initializer_range": min(shape.init_std, 1.0),  # transformers opens no Llama with more; it computes nothing
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_dropout": 0.0,
        # The older of the two spellings: transformers 5 reads it too, transformers 4 and most tools only this one.
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope_to_hf(shape),
    }
    if not family.has_head_dim and shape.head_dim * shape.heads == shape.dim:
        del config["head_dim"]
    if family.attention_bias:
        config["attention_bias"] = shape.out_bias
    if family.mlp_bias:
        config["mlp_bias"] = shape.mlp_bias
    if family.sliding_theta is not None:
        config["rope_local_base_freq"] = shape.sliding_rope_theta or shape.rope_theta
    if family.query_scalar is not None:
        config["query_pre_attn_scalar"] = shape.query_pre_attn_scalar or shape.head_dim
    return (
        config
        | window_to_hf(shape, family)
        | experts_to_hf(shape, family.routed)
        | mamba_to_hf(shape)
        | mla_to_hf(shape)
    )


def _refuse_the_inexpressible(shape: Shape, family: Family) -> None:
    """Each of these computes something that the family's transformers class does not."""
    name = shape.family
    problem = experts_problem(shape, family.routed) or mamba_problem(shape, family.mamba)
    problem = problem or mla_problem(shape, family.mla is not None)
    if problem:
        pass
    elif shape.qk_norm != family.qk_norm:
        having = _names(lambda one: one.qk_norm)
        problem = (
            f"model.qk_norm {_yaml(shape.qk_norm)} does not go with family {name}: only {having} have it, and always"
        )
    elif family.biases is not None and (shape.qkv_bias, shape.out_bias) != family.biases:
        qkv, out = (_yaml(value) for value in family.biases)
        problem = f"family {name} needs model.qkv_bias {qkv} and model.out_bias {out}"
    elif family.biases is None and shape.qkv_bias != shape.out_bias:
        problem = f"family {name} has both model.qkv_bias and model.out_bias or neither"
    elif shape.mlp_bias and not family.mlp_bias:
        problem = f"family {name} has no model.mlp_bias (llama does)"
    elif shape.sliding_window is not None and family.window is None:
        problem = f"family {name} has no model.sliding_window ({_names(lambda one: one.window is not None)} do)"
    elif shape.full_attention_layers and shape.sliding_window and family.window and family.window.leading is None:
        problem = f"family {name} has no model.full_attention_layers (qwen2, qwen3 and dots1 do)"
    elif shape.full_attention_every and (family.window is None or family.window.every is None):
        problem = f"family {name} has no model.full_attention_every (gemma3_text does)"
    elif shape.sliding_rope_theta is not None and family.sliding_theta is None:
        problem = f"family {name} has no model.sliding_rope_theta (gemma3_text does)"
    elif family.sliding_theta and shape.sliding_window and shape.rope_scaling and shape.sliding_rope_theta is None:
        problem = (
            f"model.rope_scaling of family {name} is about layers without a window alone, and "
            f"model.sliding_rope_theta, the base of those with one, is not set ({family.sliding_theta:g} is usual)"
        )
    elif shape.query_pre_attn_scalar is not None and family.query_scalar is None:
        problem = f"family {name} has no model.query_pre_attn_scalar (gemma3_text does)"
    elif family.heads_divide and shape.dim % shape.heads:
        problem = f"family {name} needs a model.dim ({shape.dim}) that is a multiple of model.heads ({shape.heads})"
    if problem:
        raise SpecError(f"{problem}, so transformers could not compute this model: change it or model.family.")


def _names(has: Callable[[Family], bool]) -> str:
    *names, last = (name for name, one in FAMILIES.items() if has(one))
    return f"{', '.join(names)} and {last}"


def _yaml(value: bool) -> str:
    return "true" if value else "false"
