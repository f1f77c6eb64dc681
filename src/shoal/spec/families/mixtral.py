"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from shoal.spec.families.family import Family, Routed, Window
from shoal.spec.families.verdicts import NO_BIAS, ROUTED, Only, read

FAMILY = Family(
    "MixtralForCausalLM",
    fields={
        **read("sliding_window num_local_experts num_experts num_experts_per_tok"),
        "router_jitter_noise": Only((0, 0.0), "Shoal adds no noise; set it to 0 to train without"),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        **ROUTED,
    },
    kv_heads=8,
    window=Window(),
    biases=(False, False),
    max_position=131072,
    norm_eps=1e-5,
    theta=1_000_000.0,
    routed=Routed(
        counts=("num_local_experts", "num_experts"),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        dense="none",
        always_normalized=True,
        width="intermediate_size",
    ),
    parts={
        "ffn.router": "block_sparse_moe.gate",
        "ffn.experts": "block_sparse_moe.experts",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
)
