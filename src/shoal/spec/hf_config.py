"""A Hugging Face config.json to the fields of `model` and back, for Llama, Qwen 2, Qwen 3 and Mistral, dense or of
experts (Mixtral, Qwen 3 MoE, dots.llm1).

Both ways refuse, with a sentence that names it, whatever the other side cannot express: a model that silently
computes something else is worse than none. A key that a config leaves out means what transformers 5 takes it to mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import SpecError
from shoal.spec.hf_experts import experts_from_hf, experts_problem, experts_to_hf
from shoal.spec.shape import Shape
from shoal.spec.start_values import STD


@dataclass(frozen=True)
class Family:
    """What transformers takes for granted in one architecture."""

    architecture: str
    kv_heads: int | None  # None: as many as heads
    head_dim: int | None  # None: hidden_size / heads
    sliding_window: int | None
    attention_bias: bool  # has the key `attention_bias`, which puts one on q, k, v and the output
    mlp_bias: bool  # has the key `mlp_bias`
    max_position: int
    qk_norm: bool = False
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    experts: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", None, None, None, True, True, 2048),
    "qwen2": Family("Qwen2ForCausalLM", 32, None, 4096, False, False, 32768),
    "qwen3": Family("Qwen3ForCausalLM", 32, 128, 4096, True, False, 32768, qk_norm=True),
    "mistral": Family("MistralForCausalLM", 8, None, 4096, False, False, 131072),
    "mixtral": Family(
        "MixtralForCausalLM", 8, None, None, False, False, 131072, norm_eps=1e-5, theta=1_000_000.0, experts=True
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", 4, None, 4096, True, False, 32768, qk_norm=True, experts=True),
    # The class with a place for all that Shoal's mixtures have: sigmoid scores, the bias that balances, shared experts.
    "dots1": Family("Dots1ForCausalLM", 32, None, 4096, True, False, 2048, qk_norm=True, experts=True),
}
_ONE_WINDOW = ("mistral", "mixtral", "qwen3_moe")  # slide in every layer or in none
_NO_HEAD_DIM = ("qwen2", "mixtral", "qwen3_moe", "dots1")
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `shoal.spec.model.Model` that a config.json states."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise SpecError(f"config.json has model_type {kind!r}, which Shoal does not know: it reads {known}.")
    family = FAMILIES[kind]
    for key in _NEEDED:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise SpecError(f"config.json gives no usable {key} ({config.get(key)!r}), so its shape is unknown.")
    _refuse_the_unknown(config, family)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    max_seq_len = _or(config.get("max_position_embeddings"), family.max_position)
    theta, scaling = _rope_from_hf(config, max_seq_len, family.theta)
    window, full_layers = _window_from_hf(config, kind, family, layers)
    bias = bool(config.get("attention_bias", False)) if family.attention_bias else False
    fields = {
        "family": kind,
        "vocab_size": config["vocab_size"],
        "dim": config["hidden_size"],
        "layers": layers,
        "heads": heads,
        "kv_heads": _or(config.get("num_key_value_heads", family.kv_heads), heads),
        "head_dim": _or(config.get("head_dim", family.head_dim), config["hidden_size"] // heads),
        "ffn_dim": config["intermediate_size"],
        "max_seq_len": max_seq_len,
        "norm_eps": float(config.get("rms_norm_eps", family.norm_eps)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": family.qk_norm,
        "qkv_bias": bias or kind == "qwen2",
        "out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)) if family.mlp_bias else False,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "sliding_window": window,
        "full_attention_layers": full_layers,
        "init_std": float(config.get("initializer_range") or STD),
    }
    return fields | {"experts": experts_from_hf(config, kind)} if family.experts else fields


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
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "initializer_range": shape.init_std,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_dropout": 0.0,
        # The older of the two spellings: transformers 5 reads it too, transformers 4 and most tools only this one.
        "rope_theta": shape.rope_theta,
        "rope_scaling": _rope_to_hf(shape),
    }
    if shape.family in _NO_HEAD_DIM and shape.head_dim * shape.heads == shape.dim:
        del config["head_dim"]  # not among their keys; read all the same when it says something else
    if family.attention_bias:
        config["attention_bias"] = shape.out_bias
    if family.mlp_bias:
        config["mlp_bias"] = shape.mlp_bias
    if shape.family != "llama":
        config["sliding_window"] = shape.sliding_window
    if shape.family in ("qwen2", "qwen3", "qwen3_moe"):
        config["use_sliding_window"] = shape.sliding_window is not None
    if shape.family in ("qwen2", "qwen3", "dots1") and shape.sliding_window is not None:
        config["max_window_layers"] = shape.full_attention_layers
    return config | experts_to_hf(shape)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _refuse_the_unknown(config: Mapping[str, Any], family: Family) -> None:
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise SpecError(f"config.json has hidden_act {act!r}: Shoal's feed-forward layers are SwiGLU (silu) only.")
    if config.get("quantization_config"):
        raise SpecError(
            "config.json has a quantization_config: Shoal reads plain weights only; dequantise the model first."
        )
    if not family.experts and (config.get("num_local_experts") or config.get("num_experts")):
        known = ", ".join(name for name, one in FAMILIES.items() if one.experts)
        raise SpecError(
            f"config.json describes a mixture of experts with model_type {config['model_type']!r}, which transformers "
            f"computes without experts: Shoal reads mixtures of model_type {known}."
        )


def _rope_from_hf(config: Mapping[str, Any], max_seq_len: int, default: float) -> tuple[float, dict[str, Any] | None]:
    """theta and `rope_scaling`, from the keys of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise SpecError("config.json has rope_parameters that differ between layers, which Shoal does not compute.")
    if _or(rope.get("partial_rotary_factor", config.get("partial_rotary_factor")), 1.0) != 1.0:
        raise SpecError("config.json has a partial_rotary_factor: Shoal's decoder rotates whole heads.")
    theta = float(_or(rope.get("rope_theta", config.get("rope_theta")), default))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise SpecError(f"config.json has rope_type {kind!r}: Shoal knows default, linear, dynamic, llama3 and yarn.")
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = original or max_seq_len
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        factor = max_seq_len / original
    if not isinstance(factor, int | float):
        raise SpecError(f"config.json has rope_type {kind!r} without a number for its factor.")
    scaling: dict[str, Any] = {"kind": kind, "factor": float(factor)}
    if kind == "llama3":
        wanted = ("low_freq_factor", "high_freq_factor")
        scaling |= {"original_max_seq_len": original, **{key: float(rope[key]) for key in wanted if key in rope}}
    elif kind == "yarn":
        if rope.get("truncate") is False:
            raise SpecError("config.json has yarn with truncate false, which Shoal does not compute.")
        scaling |= {"original_max_seq_len": original, "attention_factor": _yarn_attention_factor(rope, float(factor))}
        scaling |= {key: float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
    return theta, scaling


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """DeepSeek's two mscale keys come to one number; None means the paper's."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if not (rope.get("mscale") and rope.get("mscale_all_dim")) or factor <= 1:
        return None
    above, below = (0.1 * rope[key] * math.log(factor) + 1.0 for key in ("mscale", "mscale_all_dim"))
    return float(above / below)


def _rope_to_hf(shape: Shape) -> dict[str, Any] | None:
    scaling = shape.rope_scaling
    if scaling is None:
        return None
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original_max_seq_len or shape.max_seq_len
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            rope["attention_factor"] = scaling.attention_factor
    return rope


def _window_from_hf(config: Mapping[str, Any], kind: str, family: Family, layers: int) -> tuple[int | None, int]:
    """The sliding window, and how many leading layers ignore it."""
    if kind == "llama":
        return None, 0
    window = config.get("sliding_window", family.sliding_window)
    if kind == "qwen3_moe":  # in every layer or in none
        return (window if config.get("use_sliding_window", False) else None), 0
    if kind in ("mistral", "mixtral"):
        if len(set(config.get("layer_types") or ())) > 1:
            raise SpecError(
                "config.json has layer_types that differ: in Shoal only Qwen mixes full and sliding layers."
            )
        return window, 0
    if window is None or (kind != "dots1" and not config.get("use_sliding_window", False)):
        return None, 0
    full = min(config.get("max_window_layers", 62 if kind == "dots1" else 28), layers)
    types = config.get("layer_types")
    if types is not None:
        full = types.count("full_attention")
        if types != ["full_attention"] * full + ["sliding_attention"] * (layers - full):
            raise SpecError(
                "config.json has layer_types in an order Shoal does not compute (full first, then sliding)."
            )
    return (None, 0) if full == layers else (window, full)


def _refuse_the_inexpressible(shape: Shape, family: Family) -> None:
    """Each of these computes something that the family's transformers class does not."""
    name = shape.family
    fixed_bias = {"qwen2": (True, False), "mistral": (False, False), "mixtral": (False, False)}.get(name)
    problem = experts_problem(shape, family.experts)
    if problem:
        pass
    elif shape.qk_norm != family.qk_norm:
        having = ", ".join(name for name, one in FAMILIES.items() if one.qk_norm)
        problem = (
            f"model.qk_norm {_yaml(shape.qk_norm)} does not go with family {name}: only {having} have it, and always"
        )
    elif fixed_bias is not None and (shape.qkv_bias, shape.out_bias) != fixed_bias:
        qkv, out = (_yaml(value) for value in fixed_bias)
        problem = f"family {name} needs model.qkv_bias {qkv} and model.out_bias {out}"
    elif fixed_bias is None and shape.qkv_bias != shape.out_bias:
        problem = f"family {name} has both model.qkv_bias and model.out_bias or neither"
    elif shape.mlp_bias and not family.mlp_bias:
        problem = f"family {name} has no model.mlp_bias (llama does)"
    elif shape.sliding_window is not None and name == "llama":
        problem = "family llama has no model.sliding_window (mistral, qwen2 and qwen3 do)"
    elif shape.sliding_window is not None and shape.full_attention_layers and name in _ONE_WINDOW:
        problem = f"family {name} has no model.full_attention_layers (qwen2, qwen3 and dots1 do)"
    elif name == "llama" and shape.dim % shape.heads:
        problem = f"family llama needs a model.dim ({shape.dim}) that is a multiple of model.heads ({shape.heads})"
    if problem:
        raise SpecError(f"{problem}, so transformers could not compute this model: change it or model.family.")


def _yaml(value: bool) -> str:
    return "true" if value else "false"
