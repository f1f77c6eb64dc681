"""Qwen 3 with experts."""

from __future__ import annotations

from shoal.spec.families.family import Family, Routed, Window
from shoal.spec.families.verdicts import NO_BIAS, ROUTED, Harmless, Only, read

FAMILY = Family(
    "Qwen3MoeForCausalLM",
    fields={
        **read(
            """use_sliding_window sliding_window attention_bias num_local_experts num_experts num_experts_per_tok
            moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"""
        ),
        "max_window_layers": Harmless("unread"),
        "mlp_bias": NO_BIAS,
        "qkv_bias": Only((False,), "which layers are to have one is said by attention_bias"),
        "use_qk_norm": Only((True,), "family qwen3_moe always has it"),
        "shared_expert_intermediate_size": Only((0,), "family qwen3_moe has no shared expert"),
        **ROUTED,
    },
    kv_heads=4,
    has_head_dim=False,
    sliding_window=4096,
    window=Window(switched=True),
    attention_bias=True,
    max_position=32768,
    qk_norm=True,
    routed=Routed(
        counts=("num_experts", "num_local_experts"),
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        dense="listed",
    ),
)
