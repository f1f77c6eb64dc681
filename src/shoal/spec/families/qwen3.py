"""Qwen 3, dense: a norm on the queries and keys of each head."""

from __future__ import annotations

from shoal.spec.families.family import Family, Window
from shoal.spec.families.verdicts import DENSE, NO_BIAS, read

FAMILY = Family(
    "Qwen3ForCausalLM",
    fields={
        **read("use_sliding_window sliding_window max_window_layers attention_bias"),
        "mlp_bias": NO_BIAS,
        **DENSE,
    },
    kv_heads=32,
    head_dim=128,
    sliding_window=4096,
    window=Window(leading=28, switched=True),
    attention_bias=True,
    max_position=32768,
    qk_norm=True,
)
