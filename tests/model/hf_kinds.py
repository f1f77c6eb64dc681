"""Tiny configs of causal models that Shoal has no family for, as transformers' classes take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma2": {"sliding_window": 8},  # caps its logits
    "phi3": {},
    "qwen3_next": {
        **_DELTA, **_EXPERTS, "num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "deepseek_v3": {
        **_LATENT, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0},  # scales its logits
    "olmo2": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0,
             "attn_pdrop": 0},
    "cohere2": {"sliding_window": 8},
}  # fmt: skip
APART = {"gemma3_text", "gemma2", "phi3", "deepseek_v3", "granite", "olmo2", "gpt2", "cohere2"}
"""Those that keep documents of a row apart; a recurrent state does not, nor (in transformers 5.22) does gpt_oss."""
CAPPED = {"gemma2", "granite", "cohere2"}
"""Those that do something to their logits after the head."""


def write_config(folder: Path, kind: str, **other: Any) -> Path:
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.AutoConfig.for_model(kind, **{**_SMALL, **KINDS[kind], **other}).save_pretrained(folder)
    return folder
