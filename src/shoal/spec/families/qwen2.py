"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from shoal.spec.families.family import Family, Window
from shoal.spec.families.verdicts import DENSE, NO_BIAS, Only, read

FAMILY = Family(
    "Qwen2ForCausalLM",
    fields={
        **read("use_sliding_window sliding_window max_window_layers"),
        "attention_bias": Only((True,), "this family's class always has one"),
        "mlp_bias": NO_BIAS,
        **DENSE,
    },
    kv_heads=32,
    has_head_dim=False,
    sliding_window=4096,
    window=Window(leading=28, switched=True),
    biases=(True, False),
    max_position=32768,
)
