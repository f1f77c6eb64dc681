"""The experts of a Hugging Face config.json to `model.experts` and back, for Mixtral, Qwen 3 MoE and dots.llm1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.spec.shape import Shape

_COUNT = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "dots1": "n_routed_experts"}
_DEFAULTS = {  # what transformers 5 takes for granted; none are needed from dots1
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "dots1": {"moe_intermediate_size": 1408},
}


def experts_from_hf(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of `shoal.spec.model.Experts`.

    A model that comes in is trained as it is: no bias starts to move and no loss is added that it was not made with,
    so that what goes out again computes what was trained.
    """
    known = {**_DEFAULTS[kind], **{key: value for key, value in config.items() if value is not None}}
    if kind != "mixtral" and _COUNT[kind] not in config and "num_local_experts" in known:
        known[_COUNT[kind]] = known["num_local_experts"]  # as transformers 5 writes it for all
    width = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    for key in (_COUNT[kind], "num_experts_per_tok", width):
        if not isinstance(known.get(key), int) or known[key] < 1:
            raise SpecError(f"config.json gives no usable {key} ({known.get(key)!r}), so its experts are unknown.")
    _refuse_the_unknown(known, kind)
    return {
        "count": known[_COUNT[kind]],
        "top_k": known["num_experts_per_tok"],
        "ffn_dim": known[width],
        "shared": known.get("n_shared_experts", 0) if kind == "dots1" else 0,
        "dense_layers": _dense_layers(known, kind),
        "score": "sigmoid" if kind == "dots1" else "softmax",
        "normalize": True if kind == "mixtral" else bool(known.get("norm_topk_prob", False)),
        "balance_rate": 0.0,
        "balance_loss": 0.0,
        "z_loss": 0.0,
    }


def experts_to_hf(shape: Shape) -> dict[str, Any]:
    """The keys of config.json that the experts add; `intermediate_size` is an expert's width in Mixtral alone."""
    e = shape.experts
    if e is None:
        return {}
    config: dict[str, Any] = {_COUNT[shape.family]: e.count, "num_experts_per_tok": e.top_k}
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


def _dense_layers(config: Mapping[str, Any], kind: str) -> int:
    """Leading layers without experts; any other arrangement is refused."""
    if kind == "mixtral":
        return 0
    if kind == "dots1":
        return int(config.get("first_k_dense_replace", 0))
    layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    only = config.get("mlp_only_layers", [])
    dense = [i for i in range(layers) if i in only or (i + 1) % max(step, 1)]
    if dense != list(range(len(dense))) or len(dense) == layers:
        raise SpecError(
            f"config.json has decoder_sparse_step {step} and mlp_only_layers {only}, which make dense layers other "
            "than the first few, or all: Shoal computes dense layers first, then those with experts."
        )
    return len(dense)


def _refuse_the_unknown(config: Mapping[str, Any], kind: str) -> None:
    if kind == "mixtral" and config.get("router_jitter_noise", 0):
        raise SpecError("config.json has router_jitter_noise, which Shoal does not add: set it to 0 to train without.")
    if kind == "dots1" and config.get("n_group", 1) != 1:
        raise SpecError("config.json has n_group above 1: Shoal's routers choose among all experts, not within groups.")
    if kind == "dots1" and config.get("routed_scaling_factor", 1.0) != 1.0:
        raise SpecError("config.json has a routed_scaling_factor other than 1, which Shoal does not compute.")
