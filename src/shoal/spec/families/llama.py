"""Llama 2 and 3, and the many that share their class (SmolLM, Yi, DeepSeek's first)."""

from __future__ import annotations

from shoal.spec.families.family import Family
from shoal.spec.families.verdicts import DENSE, Only, read

FAMILY = Family(
    "LlamaForCausalLM",
    fields={
        **read("attention_bias mlp_bias"),
        "sliding_window": Only((), "family llama has none"),
        "use_sliding_window": Only((False,), "this family's class has no such switch"),
        **DENSE,
    },
    attention_bias=True,
    mlp_bias=True,
    max_position=2048,
    heads_divide=True,
)
