"""dots.llm1: the class with a place for all that Shoal's mixtures have: sigmoid scores, the bias that balances, shared
experts."""

from __future__ import annotations

from shoal.spec.families.family import Family, Routed, Window
from shoal.spec.families.verdicts import NO_BIAS, ROUTED, Harmless, Only, read

_ONE_GROUP = "Shoal's routers choose among all experts, not within groups"

FAMILY = Family(
    "Dots1ForCausalLM",
    fields={
        **read(
            """sliding_window max_window_layers attention_bias n_routed_experts num_local_experts n_shared_experts
            num_experts_per_tok moe_intermediate_size norm_topk_prob first_k_dense_replace"""
        ),
        "n_group": Only((1,), _ONE_GROUP),
        "topk_group": Only((1,), _ONE_GROUP),
        "routed_scaling_factor": Only((1, 1.0), "Shoal does not scale what the experts say"),
        "moe_layer_freq": Only((1,), "Shoal computes dense layers first, then those with experts"),
        "scoring_func": Only(("sigmoid", "noaux_tc"), "family dots1 scores by sigmoids"),
        "topk_method": Only(("noaux_tc",), "family dots1 picks experts by score and bias"),
        "use_sliding_window": Harmless("unread"),
        "mlp_bias": NO_BIAS,
        **ROUTED,
    },
    kv_heads=32,
    has_head_dim=False,
    sliding_window=4096,
    window=Window(leading=62),
    attention_bias=True,
    max_position=2048,
    qk_norm=True,
    routed=Routed(
        counts=("n_routed_experts", "num_local_experts"),
        defaults={"moe_intermediate_size": 1408},
        dense="first",
        holds_bias=True,
        shared=True,
        score="sigmoid",
    ),
)
