"""DeepSeek-V3 (R1, Moonlight): latent attention, and experts that are picked within groups."""

from __future__ import annotations

from shoal.spec.families.family import Family, Routed
from shoal.spec.families.verdicts import NO_BIAS, ROUTED, Only, harmless, read

FAMILY = Family(
    "DeepseekV3ForCausalLM",
    fields={
        **read(
            """attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim
            rope_interleave n_routed_experts num_local_experts n_shared_experts num_experts_per_tok
            moe_intermediate_size norm_topk_prob first_k_dense_replace n_group topk_group routed_scaling_factor"""
        ),
        # Layers that guess further tokens: of use to who generates, and no part of what is trained.
        **harmless(generation="num_nextn_predict_layers num_mtp_layers"),
        "moe_layer_freq": Only((1,), "Shoal computes dense layers first, then those with experts"),
        "scoring_func": Only(("sigmoid",), "family deepseek_v3 scores by sigmoids"),
        "topk_method": Only(("noaux_tc",), "family deepseek_v3 picks experts by score and bias"),
        "sliding_window": Only((), "family deepseek_v3 has none"),
        "use_sliding_window": Only((False,), "this family's class has no such switch"),
        "mlp_bias": NO_BIAS,
        **ROUTED,
    },
    kv_heads=128,
    attention_bias=True,
    max_position=4096,
    mla={
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    routed=Routed(
        counts=("n_routed_experts", "num_local_experts"),
        defaults={
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
        },
        dense="first",
        holds_bias=True,
        shared=True,
        groups=True,
        scale=2.5,
        normalized=True,
        score="sigmoid",
    ),
)
