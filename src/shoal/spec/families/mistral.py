"""Mistral: a sliding window in every layer or in none."""

from __future__ import annotations

from shoal.spec.families.family import Family, Window
from shoal.spec.families.verdicts import DENSE, NO_BIAS, Harmless, read

FAMILY = Family(
    "MistralForCausalLM",
    fields={
        **read("sliding_window"),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "use_sliding_window": Harmless("unread"),
        "max_window_layers": Harmless("unread"),
        **DENSE,
    },
    kv_heads=8,
    sliding_window=4096,
    window=Window(),
    biases=(False, False),
    max_position=131072,
)
