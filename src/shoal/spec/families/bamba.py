"""Bamba: state-space layers (Mamba-2) with attention in a few, which turns half of each head."""

from __future__ import annotations

import math

from shoal.spec.families.family import Family
from shoal.spec.families.verdicts import DENSE, Only, harmless, read

_NO_LIMIT = (0.0, math.inf)
_WRITTEN = [0.0, {"__float__": "Infinity"}]  # as transformers 5 does, since JSON has no infinity
_BY_INDICES = "which layers have attention is said by attn_layer_indices"

FAMILY = Family(
    "BambaForCausalLM",
    fields={
        **read(
            """attention_bias mlp_bias attn_layer_indices mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state
            mamba_d_conv mamba_expand mamba_conv_bias mamba_proj_bias"""
        ),
        **harmless(speed="mamba_chunk_size", loss="z_loss_coefficient", generation="num_logits_to_keep"),
        "time_step_limit": Only((_NO_LIMIT, list(_NO_LIMIT), _WRITTEN), "Shoal does not limit the steps of a state"),
        "layer_types": Only((), _BY_INDICES),
        "layers_block_type": Only((), _BY_INDICES),
        "sliding_window": Only((), "family bamba has none"),
        **DENSE,
    },
    kv_heads=8,
    has_head_dim=False,
    attention_bias=True,
    mlp_bias=True,
    max_position=262_144,
    norm_eps=1e-5,
    rotary=0.5,
    mamba=True,
    parts={
        "norm": "final_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        "ffn.gate": "feed_forward.gate_proj",
        "ffn.up": "feed_forward.up_proj",
        "ffn.down": "feed_forward.down_proj",
        "mamba_norm": "input_layernorm",
        "mamba.dt_bias": "mamba.dt_bias",
        "mamba.a_log": "mamba.A_log",
        "mamba.d": "mamba.D",
        "mamba.norm": "mamba.norm",
        "mamba.out": "mamba.out_proj",
    },
    joined={
        "mamba.in_proj": ("mamba.gate", "mamba.x", "mamba.b", "mamba.c", "mamba.dt"),
        "mamba.conv1d": ("mamba.x_conv", "mamba.b_conv", "mamba.c_conv"),
    },
)
