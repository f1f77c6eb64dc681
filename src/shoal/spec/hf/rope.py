"""Rotary positions of a config.json to `rope_theta` and `model.rope_scaling` and back.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters` with both. Where a folder
has several, the first of them counts that transformers 5 takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.spec.families import Family
from shoal.spec.hf.fields import ROPE_FIELDS
from shoal.spec.hf.numbers import MOST_POSITIONS, real, whole
from shoal.spec.shape import Shape
from shoal.values import BadValue, inside, shown

FULL, SLIDING = "full_attention", "sliding_attention"


def rope_from_hf(config: Mapping[str, Any], max_seq_len: int, family: Family) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`."""
    if family.sliding_theta is not None:
        rope = _of_full_layers(config)
    else:
        rope = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    with inside("rope_scaling" if config.get("rope_scaling") else "rope_parameters"):
        theta, scaling = _read(rope, config, max_seq_len, family)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        with inside(key):
            raise BadValue(f"a {type(rope).__name__} where an object belongs")
    return rope


def _of_full_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Where layers with a window have rotary positions of their own: `rope_parameters` has an object for each kind, and
    the older `rope_scaling` is about those without one."""
    both, scaling = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    if others := [name for name in both if name not in (FULL, SLIDING)]:
        raise SpecError(
            f"config.json has {shown(others[0])} in its rope_parameters, which in this family are an object each of "
            f"{FULL} and {SLIDING}."
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise SpecError(
            "config.json has a rope_scaling with a `type`, which transformers does not read in this family: say "
            "rope_type."
        )
    if scaling and both.get(FULL) is None and both:
        raise SpecError(f"config.json has a rope_scaling, and rope_parameters without {FULL}: keep one of them.")
    with inside("rope_parameters"):
        return {"rope_type": "default", **_object(both, FULL), **scaling}


def sliding_theta_from_hf(config: Mapping[str, Any], default: float) -> float:
    """The base of layers with a window."""
    with inside("rope_parameters"):
        rope = _object(_object(config, "rope_parameters"), SLIDING)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    unknown = [
        name for name, value in rope.items() if name not in ("rope_type", "type", "rope_theta") and value is not None
    ]
    if kind != "default" or unknown:
        what = f"rope_type {shown(kind)!r}" if kind != "default" else shown(unknown[0])
        raise SpecError(f"config.json has {what} for its {SLIDING}, and Shoal does not stretch the positions of these.")
    local = {"rope_theta": config["rope_local_base_freq"]} if config.get("rope_local_base_freq") is not None else {}
    return real({**local, **rope}, "rope_theta", default)


def _read(
    rope: dict[str, Any], config: Mapping[str, Any], max_seq_len: int, family: Family
) -> tuple[float, dict[str, Any] | None]:
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise SpecError("config.json has rope_parameters that differ between layers, which Shoal does not compute.")
    if unknown := [name for name, value in rope.items() if name not in ROPE_FIELDS and value is not None]:
        raise SpecError(f"config.json has {shown(unknown[0])} in its RoPE, a field that Shoal does not know.")
    turned = real({**_part(config, "partial_rotary_factor"), **rope}, "partial_rotary_factor", family.rotary)
    if turned != family.rotary:
        raise SpecError(
            f"config.json has a partial_rotary_factor of {turned:g}: Shoal's decoder rotates "
            + ("whole heads." if family.rotary == 1 else f"{family.rotary:g} of each head in this family.")
        )
    theta = real({**_part(config, "rope_theta"), **rope}, "rope_theta", family.theta)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise SpecError(
            f"config.json has rope_type {shown(kind)!r}: Shoal knows default, linear, dynamic, llama3 and yarn."
        )
    key = "original_max_position_embeddings"
    original = whole({**rope, **_part(config, key)}, key, MOST_POSITIONS, max_seq_len)
    factor = real(rope, "factor", max_seq_len / original if kind == "yarn" else None, least=1.0)
    scaling: dict[str, Any] = {"kind": kind, "factor": factor}
    if kind == "llama3":
        wanted = ("low_freq_factor", "high_freq_factor")
        scaling |= {"original_max_seq_len": original, **{name: real(rope, name) for name in wanted}}
    elif kind == "yarn":
        if rope.get("truncate", True) is not True:  # null and 0 are false to transformers
            raise SpecError("config.json has yarn with truncate false, which Shoal does not compute.")
        scaling |= {"original_max_seq_len": original, "attention_factor": _attention_factor(rope, factor)}
        scaling |= {name: real(rope, name) for name in ("beta_fast", "beta_slow") if rope.get(name)}
    if family.mla is not None and (all_dim := real(rope, "mscale_all_dim", 0.0)):
        if kind != "yarn":
            raise SpecError(f"config.json has mscale_all_dim with rope_type {kind}: Shoal computes it with yarn alone.")
        scaling["mscale_all_dim"] = all_dim
    return theta, scaling


def _part(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: config[key]} if config.get(key) is not None else {}


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """DeepSeek's two mscale keys come to one number; None means the paper's."""
    if rope.get("attention_factor") is not None:
        return real(rope, "attention_factor")
    above, below = (real(rope, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    if not (above and below) or factor <= 1:
        return None
    log = math.log(factor)
    return (0.1 * above * log + 1.0) / (0.1 * below * log + 1.0)


def rope_to_hf(shape: Shape) -> dict[str, Any] | None:
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
        if scaling.mscale_all_dim is not None:
            rope["mscale_all_dim"] = scaling.mscale_all_dim
    return rope
