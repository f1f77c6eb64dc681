"""The experts of a Hugging Face config.json to `model.experts` and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal import values
from shoal.errors import SpecError
from shoal.spec.families import FAMILIES, Routed
from shoal.spec.hf.numbers import MOST_EXPERTS, MOST_LAYERS, MOST_WIDE, real, truth, whole
from shoal.spec.shape import Shape
from shoal.values import inside, shown


def experts_from_hf(config: Mapping[str, Any], routed: Routed, layers: int) -> dict[str, Any]:
    """The fields of `shoal.spec.model.Experts`.

    A model that comes in is trained as it is: no bias starts to move and no loss is added that it was not made with,
    so that what goes out again computes what was trained.
    """
    defaults = routed.defaults
    found = {
        "count": _count(config, routed),
        "top_k": whole(config, "num_experts_per_tok", MOST_EXPERTS, defaults.get("num_experts_per_tok")),
        "ffn_dim": whole(config, routed.width, MOST_WIDE, defaults.get(routed.width)),
        "shared": whole(config, "n_shared_experts", MOST_EXPERTS, defaults.get("n_shared_experts"))
        if routed.shared
        else 0,
        "dense_layers": _dense_layers(config, routed, layers),
        "score": routed.score,
        "normalize": True if routed.always_normalized else truth(config, "norm_topk_prob", routed.normalized),
        "balance_rate": 0.0,
        "balance_loss": 0.0,
        "z_loss": 0.0,
    }
    if not routed.groups:
        return found
    return found | {
        "groups": whole(config, "n_group", MOST_EXPERTS, defaults["n_group"]),
        "top_groups": whole(config, "topk_group", MOST_EXPERTS, defaults["topk_group"]),
        "routed_scale": real(config, "routed_scaling_factor", routed.scale),
    }


def _count(config: Mapping[str, Any], routed: Routed) -> int:
    """transformers knows the number by two names, of which the one that the class does not declare wins."""
    said = {name: config[name] for name in routed.counts if config.get(name) is not None}
    if len(set(map(repr, said.values()))) > 1:
        raise SpecError(
            f"config.json has {' and '.join(f'{name} {shown(value)}' for name, value in said.items())}, which are two "
            "names of one number: remove one."
        )
    name = next(iter(said), routed.counts[0])
    return whole(config, name, MOST_EXPERTS, routed.defaults.get(name))


def experts_to_hf(shape: Shape, routed: Routed | None) -> dict[str, Any]:
    """The keys of config.json that the experts add."""
    e = shape.experts
    if e is None or routed is None:
        return {}
    config: dict[str, Any] = {routed.counts[0]: e.count, "num_experts_per_tok": e.top_k, routed.width: e.ffn_dim}
    if not routed.always_normalized:
        config["norm_topk_prob"] = e.normalize
    if routed.dense == "listed":
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(e.dense_layers))}
    if routed.dense == "first":
        config["first_k_dense_replace"] = e.dense_layers
    if routed.shared:
        config |= {"n_group": e.groups, "topk_group": e.top_groups}
        config |= {"routed_scaling_factor": e.routed_scale, "n_shared_experts": e.shared}
    return config


def experts_problem(shape: Shape, routed: Routed | None) -> str:
    """What the family's transformers class cannot compute, as half a sentence; empty when it can."""
    e, name = shape.experts, shape.family
    if e is None:
        return f"family {name} needs model.experts" if routed else ""
    if routed is None:
        return f"family {name} has no model.experts ({_those(lambda r: True)} do)"
    if e.score != routed.score:
        others = _those(lambda r: r.score == e.score)
        return f"family {name} needs model.experts.score {routed.score} ({others} {_has(others)} {e.score})"
    if routed.shared and not e.shared:
        return f"family {name} needs model.experts.shared of at least 1"
    if e.shared and not routed.shared:
        others = _those(lambda r: r.shared)
        return f"family {name} has no model.experts.shared ({others} {'do' if ' and ' in others else 'does'})"
    for key in ("groups", "routed_scale"):
        if getattr(e, key) != 1 and not routed.groups:
            return f"family {name} has no model.experts.{key} ({_those(lambda r: r.groups)} does)"
    if e.dense_layers and routed.dense == "none":
        return f"family {name} has no model.experts.dense_layers ({_those(lambda r: r.dense != 'none')} do)"
    if routed.always_normalized and not e.normalize:
        return f"family {name} needs model.experts.normalize true"
    return ""


def _those(have: Callable[[Routed], bool]) -> str:
    """The families of which it is true, as a list in words."""
    *most, last = (name for name, family in FAMILIES.items() if family.routed is not None and have(family.routed))
    return f"{', '.join(most)} and {last}" if most else last


def _has(names: str) -> str:
    return "have" if " and " in names else "has"


def _dense_layers(config: Mapping[str, Any], routed: Routed, layers: int) -> int:
    """Leading layers without experts; any other arrangement is refused."""
    if routed.dense == "none":
        return 0
    if routed.dense == "first":
        return whole(
            config, "first_k_dense_replace", MOST_LAYERS, routed.defaults.get("first_k_dense_replace", 0), least=0
        )
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
