"""The latent attention of a Hugging Face config.json to `model.mla` and back, for DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.spec.hf.numbers import MOST_WIDE, truth, whole
from shoal.spec.shape import Shape
from shoal.values import shown


def mla_from_hf(config: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, Any]:
    """The fields of `shoal.spec.model.Mla`. A rank of null is none: queries are made of the stream."""
    fields: dict[str, Any] = {name: whole(config, name, MOST_WIDE, default) for name, default in defaults.items()}
    if "q_lora_rank" in config and config["q_lora_rank"] is None:
        fields["q_lora_rank"] = None
    turned = fields["qk_rope_head_dim"]
    # What the class makes of the others; another number would change the positions, or nothing.
    for name, made in (("head_dim", turned), ("qk_head_dim", turned + fields["qk_nope_head_dim"])):
        if config.get(name) is not None and config[name] != made:
            raise SpecError(f"config.json has {name} {shown(config[name])}, and its other widths make that {made}.")
    return fields | {"rope_interleave": truth(config, "rope_interleave", True)}


def mla_to_hf(shape: Shape) -> dict[str, Any]:
    m = shape.mla
    if m is None:
        return {}
    return {
        "head_dim": m.qk_rope_head_dim,
        "q_lora_rank": m.q_lora_rank,
        "kv_lora_rank": m.kv_lora_rank,
        "qk_nope_head_dim": m.qk_nope_head_dim,
        "qk_rope_head_dim": m.qk_rope_head_dim,
        "qk_head_dim": shape.head_dim,
        "v_head_dim": m.v_head_dim,
        "rope_interleave": m.rope_interleave,
    }


def mla_problem(shape: Shape, has_mla: bool) -> str:
    """What the family's transformers class cannot compute, as half a sentence; empty when it can."""
    if shape.mla is None:
        return f"family {shape.family} needs model.mla" if has_mla else ""
    return "" if has_mla else f"family {shape.family} has no model.mla (deepseek_v3 does)"
