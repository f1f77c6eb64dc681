"""Gemma 3, the text model: a window in five layers of six, with rotary positions of their own; norms on both sides."""

from __future__ import annotations

from shoal.spec.families.family import Family, Window
from shoal.spec.families.verdicts import DENSE, NO_BIAS, Harmless, Only, read

_NO_CAP = "Shoal caps no logits"

FAMILY = Family(
    "Gemma3ForCausalLM",
    fields={
        **read(
            """sliding_window sliding_window_pattern attention_bias hidden_activation query_pre_attn_scalar
            rope_local_base_freq"""
        ),
        "_sliding_window_pattern": Harmless("unread"),  # layer_types says it
        "hidden_act": Harmless("unread"),
        "use_sliding_window": Harmless("unread"),
        "cache_implementation": Harmless("generation"),
        "final_logit_softcapping": Only((), _NO_CAP),
        "attn_logit_softcapping": Only((), _NO_CAP),
        "use_bidirectional_attention": Only((False,), "Shoal's attention is causal"),
        "mlp_bias": NO_BIAS,
        **DENSE,
    },
    kv_heads=4,
    head_dim=256,
    sliding_window=4096,
    window=Window(every=6),
    attention_bias=True,
    max_position=131_072,
    qk_norm=True,
    theta=1_000_000.0,
    sliding_theta=10_000.0,
    act="gelu_tanh",
    act_key="hidden_activation",
    tied=True,
    query_scalar=256,
    centred_norms=True,
    post_norms=True,
    scaled_embedding=True,
    heads_divide=True,
    parts={
        "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
)
