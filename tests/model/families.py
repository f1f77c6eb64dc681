"""Tiny random models of each family, as transformers makes them. Imported once: transformers takes seconds."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from typing import Any

import torch
import transformers
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    Dots1Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from shoal.spec.families import FAMILIES

transformers.utils.logging.disable_progress_bar()

SMALL: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Large weights, so that attention is far from uniform and a wrong angle or mask shows.
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

# Four groups of two experts, of which a token sees two: three experts are picked among four.
DEEPSEEK: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
DEEP_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1}

CONFIGS = {
    "llama2": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 4}, rms_norm_eps=1e-5),
    "llama-biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, head_dim=20),
    "llama3": lambda: LlamaConfig(**SMALL, rope_theta=500_000.0, rope_scaling=dict(LLAMA3)),
    "llama3-tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True, rope_scaling=dict(LLAMA3)),
    "llama-linear": lambda: LlamaConfig(**SMALL, rope_scaling={"rope_type": "linear", "factor": 2.5}),
    # 40 tokens pass its 16 positions, so the base has to stretch.
    "llama-dynamic": lambda: LlamaConfig(
        **SMALL | {"max_position_embeddings": 16}, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    ),
    "llama-yarn": lambda: LlamaConfig(**SMALL, rope_scaling=dict(YARN)),
    "llama-yarn-given": lambda: LlamaConfig(
        **SMALL, rope_scaling=YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0}
    ),
    "qwen2": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-sliding": lambda: Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=20, rope_theta=1_000_000.0),
    "qwen3-sliding": lambda: Qwen3Config(
        **SMALL, head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=7, max_window_layers=2
    ),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=None, head_dim=20),
    "mistral-sliding": lambda: MistralConfig(**SMALL, sliding_window=11),
    "mistral-yarn-tied": lambda: MistralConfig(
        **SMALL,
        sliding_window=None,
        tie_word_embeddings=True,
        rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-sliding-tied": lambda: MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=1, sliding_window=9, head_dim=20, tie_word_embeddings=True
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SMALL, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True, head_dim=20
    ),
    "qwen3-moe-dense-first": lambda: Qwen3MoeConfig(
        **SMALL,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=7,
    ),
    "dots1": lambda: Dots1Config(
        **SMALL,
        n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        sliding_window=None,
    ),
    "bamba": lambda: BambaConfig(**SMALL, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=16),
    "bamba-groups-biases-tied": lambda: BambaConfig(
        **SMALL,
        attn_layer_indices=[0, 2],
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=8,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_scaling=dict(YARN),
    ),
    # Attention of a fifth of what head_dim would say, so that a missing scale shows.
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 4},
        head_dim=20,
        query_pre_attn_scalar=500,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma3-linear-biases-untied": lambda: Gemma3TextConfig(
        **SMALL,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=9,
        sliding_window_pattern=3,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_local_base_freq=500.0,
    ),
    "deepseek-v3": lambda: DeepseekV3Config(**DEEPSEEK, q_lora_rank=24, rope_scaling=DEEP_YARN),
    "deepseek-v3-plain-queries-biases-tied": lambda: DeepseekV3Config(
        **DEEPSEEK | {"norm_topk_prob": False, "v_head_dim": 20, "n_group": 1, "topk_group": 1},
        q_lora_rank=None,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
}


def random_model(name: str) -> Any:
    """A transformers model whose norms and biases are random too: ones and zeros would hide a missing one."""
    torch.manual_seed(sorted(CONFIGS).index(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                one = "norm" in parameter_name and not FAMILIES[model.config.model_type].centred_norms
                parameter.normal_(float(one), 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def opened(folder: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits
