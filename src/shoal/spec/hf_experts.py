"""The experts of a Hugging Face config.json to `model.experts` and back, for Mixtral, Qwen 3 MoE and dots.llm1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal import values
from shoal.errors import SpecError
from shoal.spec.hf_values import MOST_EXPERTS, MOST_LAYERS, MOST_WIDE, flag, whole
from shoal.spec.shape import Shape
from shoal.values import inside, shown

_COUNTS = {  # the class's own name first
    "mixtral": ("num_local_experts", "num_experts"),
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "dots1": ("n_routed_experts", "num_local_experts"),
}
_DEFAULTS: dict[str, dict[str, int]] = {  # what transformers 5 takes for granted; none are needed from dots1
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "dots1": {"moe_intermediate_size": 1408},
}


def experts_from_hf(config: Mapping[str, Any], kind: str, layers: int) -> dict[str, Any]:
    """The fields of `shoal.spec.model.Experts`.

    A model that comes in is trained as it is: no bias starts to move and no loss is added that it was not made with,
    so that what goes out again computes what was trained.
    """
    defaults = _DEFAULTS[kind]
    width = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    return {
        "count": _count(config, kind),
        "top_k": whole(config, "num_experts_per_tok", MOST_EXPERTS, defaults.get("num_experts_per_tok")),
        "ffn_dim": whole(config, width, MOST_WIDE, defaults.get(width)),
        "shared": whole(config, "n_shared_experts", MOST_EXPERTS) if kind == "dots1" else 0,
        "dense_layers": _dense_layers(config, kind, layers),
        "score": "sigmoid" if kind == "dots1" else "softmax",
        "normalize": True if kind == "mixtral" else flag(config, "norm_topk_prob"),
        "balance_rate": 0.0,
        "balance_loss": 0.0,
        "z_loss": 0.0,
    }


def _count(config: Mapping[str, Any], kind: str) -> int:
    """transformers knows the number by two names, of which the one that the class does not declare wins."""
    said = {name: config[name] for name in _COUNTS[kind] if config.get(name) is not None}
    if len(set(map(repr, said.values()))) > 1:
        raise SpecError(
            f"config.json has {' and '.join(f'{name} {shown(value)}' for name, value in said.items())}, which are two "
            "names of one number: remove one."
        )
    name = next(iter(said), _COUNTS[kind][0])
    return whole(config, name, MOST_EXPERTS, _DEFAULTS[kind].get(name))


def experts_to_hf(shape: Shape) -> dict[str, Any]:
    """The keys of config.json that the experts add; `intermediate_size` is an expert's width in Mixtral alone."""
    e = shape.experts
    if e is None:
        return {}
    config: dict[str, Any] = {_COUNTS[shape.family][0]: e.count, "num_experts_per_tok": e.top_k}
    if shape.family == "mixtral":
        return config | {"intermediate_size": e.ffn_dim}
    config |= {"moe_intermediate_size": e.ffn_dim, "norm_topk_prob": e.normalize}
    if shape.family == "qwen3_moe":
        return config | {"decoder_sparse_step": 1, "mlp_only_layers": list(range(e.dense_layers))}
    groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    return config | groups | {"n_shared_experts": e.shared, "first_k_dense_replace": e.dense_layers}


def experts_problem(shape: Shape, has_experts: bool) -> str:
    """What the family's transformers class cannot compute, as half a sentence; empty when it can."""
    e, name = shape.experts, shape.family
    if e is None:
        return f"family {name} needs model.experts" if has_experts else ""
    if not has_experts:
        return f"family {name} has no model.experts (mixtral, qwen3_moe and dots1 do)"
    if name == "dots1":
        if e.score != "sigmoid":
            return "family dots1 needs model.experts.score sigmoid (mixtral and qwen3_moe have softmax)"
        return "" if e.shared else "family dots1 needs model.experts.shared of at least 1"
    if e.score != "softmax":
        return f"family {name} needs model.experts.score softmax (dots1 has sigmoid)"
    if e.shared:
        return f"family {name} has no model.experts.shared (dots1 does)"
    if name == "mixtral" and e.dense_layers:
        return "family mixtral has no model.experts.dense_layers (qwen3_moe and dots1 do)"
    if name == "mixtral" and not e.normalize:
        return "family mixtral needs model.experts.normalize true"
    return ""


def _dense_layers(config: Mapping[str, Any], kind: str, layers: int) -> int:
    """Leading layers without experts; any other arrangement is refused."""
    if kind == "mixtral":
        return 0
    if kind == "dots1":
        return whole(config, "first_k_dense_replace", MOST_LAYERS, 0, least=0)
    step = whole(config, "decoder_sparse_step", MOST_LAYERS, 1)
    with inside("mlp_only_layers"):
        only = {values.whole(i, MOST_LAYERS) for i in values.items(config.get("mlp_only_layers") or [], MOST_LAYERS)}
    dense = [i for i in range(layers) if i in only or (i + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        raise SpecError(
            f"config.json has decoder_sparse_step {step} and mlp_only_layers {shown(sorted(only))}, which make dense "
            "layers other than the first few, or all: Shoal computes dense layers first, then those with experts."
        )
    return len(dense)
