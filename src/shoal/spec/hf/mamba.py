"""The state-space layers of a Hugging Face config.json to `model.mamba` and back, for Bamba."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal import values
from shoal.errors import SpecError
from shoal.spec.hf.numbers import MOST_HEADS, MOST_LAYERS, MOST_WIDE, flag, whole
from shoal.spec.mixers.mamba import inner_dim
from shoal.spec.shape import Shape
from shoal.values import inside

_MOST_EXPANDED = 1 << 10
_MOST_CONVOLVED = 1 << 10


def mamba_from_hf(config: Mapping[str, Any], dim: int, layers: int) -> dict[str, Any]:
    """The fields of `shoal.spec.model.Mamba`; what is left out is what transformers 5 takes for granted."""
    inner = dim * whole(config, "mamba_expand", _MOST_EXPANDED, 2)
    heads = whole(config, "mamba_n_heads", MOST_HEADS, 128)
    given = {} if config.get("mamba_d_head") == "auto" else config
    head_dim = whole(given, "mamba_d_head", MOST_WIDE, max(inner // heads, 1))
    if head_dim * heads != inner:
        raise SpecError(
            f"config.json has mamba_n_heads {heads} of mamba_d_head {head_dim}, which are not the {inner} of "
            "mamba_expand x hidden_size: transformers does not compute that."
        )
    with inside("attn_layer_indices"):
        listed = values.items(config.get("attn_layer_indices") or [], MOST_LAYERS)
        attention = {values.whole(i, MOST_LAYERS, 0) for i in listed}
    return {
        "attention_layers": tuple(sorted(i for i in attention if i < layers)),
        "heads": heads,
        "head_dim": head_dim,
        "state_dim": whole(config, "mamba_d_state", MOST_WIDE, 256),
        "groups": whole(config, "mamba_n_groups", MOST_HEADS, 1),
        "conv_width": whole(config, "mamba_d_conv", _MOST_CONVOLVED, 4),
        "conv_bias": flag(config, "mamba_conv_bias", True),
        "proj_bias": flag(config, "mamba_proj_bias"),
    }


def mamba_to_hf(shape: Shape) -> dict[str, Any]:
    m = shape.mamba
    if m is None:
        return {}
    return {
        "attn_layer_indices": sorted(set(m.attention_layers)),
        "mamba_n_heads": m.heads,
        "mamba_d_head": m.head_dim,
        "mamba_n_groups": m.groups,
        "mamba_d_state": m.state_dim,
        "mamba_d_conv": m.conv_width,
        "mamba_expand": inner_dim(m) // shape.dim,
        "mamba_conv_bias": m.conv_bias,
        "mamba_proj_bias": m.proj_bias,
        "mamba_chunk_size": 256,
        "z_loss_coefficient": 0.0,
    }


def mamba_problem(shape: Shape, has_mamba: bool) -> str:
    """What the family's transformers class cannot compute, as half a sentence; empty when it can."""
    m, name = shape.mamba, shape.family
    if m is None:
        return f"family {name} needs model.mamba" if has_mamba else ""
    if not has_mamba:
        return f"family {name} has no model.mamba (bamba does)"
    if inner_dim(m) % shape.dim:
        return (
            f"family {name} needs model.mamba.heads x head_dim ({inner_dim(m)}) to be a multiple of model.dim "
            f"({shape.dim})"
        )
    return ""
