"""What a model is: the shape of a decoder, as a run file states it. No torch here; `shoal.model` builds it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.spec.base import Auto, CountOrAuto, LocalPath, Strict


class RopeScaling(Strict):
    """How rotary positions stretch past the length the model was trained on. Names and maths follow transformers."""

    kind: Literal["linear", "dynamic", "llama3", "yarn"] = Field(description="Which rule stretches the frequencies.")
    factor: float = Field(ge=1.0, description="How many times longer the context becomes.")
    original_max_seq_len: int | None = Field(None, ge=1, description="The length before stretching (llama3 needs it).")
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: wavelengths longer than original/low are divided.")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: wavelengths shorter than original/high stay.")
    beta_fast: float = Field(32.0, gt=0, description="yarn: rotations above which a dimension is left alone.")
    beta_slow: float = Field(1.0, gt=0, description="yarn: rotations below which a dimension is interpolated.")
    attention_factor: float | None = Field(None, gt=0, description="yarn: scale on cos and sin; derived when empty.")
    mscale_all_dim: float | None = Field(
        None,
        gt=0,
        description="yarn with `mla` (DeepSeek): scores grow by the square of 1 + this x 0.1 x ln factor.",
    )


class Experts(Strict):
    """The mixture-of-experts part of a model's shape."""

    count: int = Field(ge=2, description="Routed experts in each sparse layer.")
    top_k: int = Field(ge=1, description="Experts that see each token.")
    ffn_dim: int = Field(ge=1, description="Hidden width of one expert.")
    shared: int = Field(0, ge=0, description="Experts that see every token.")
    dense_layers: int = Field(0, ge=0, description="Leading layers that stay dense.")
    score: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="How router logits become scores: over all experts (Mixtral, Qwen 3) or each by itself."
    )
    normalize: bool = Field(True, description="The weights of a token's experts are made to sum to one.")
    groups: int = Field(1, ge=1, description="Experts lie in so many groups, of which a token sees some (DeepSeek).")
    top_groups: int = Field(
        1, ge=1, description="Groups that a token's experts may lie in: those with the best two experts."
    )
    routed_scale: float = Field(1.0, gt=0, description="What the picked experts say is multiplied by this (DeepSeek).")
    balance_rate: Annotated[float, Field(ge=0)] | Auto = Field(
        "auto",
        description="How far each step moves the bias that evens out the experts' loads (arXiv:2408.15664); 0: off. "
        "`auto`: 1e-3, and 0 for a family whose class has no place for it (mixtral, qwen3_moe).",
    )
    balance_loss: Annotated[float, Field(ge=0)] | Auto = Field(
        "auto",
        description="Weight of a loss that evens them out instead, by the loads of the whole batch before; 0: off. "
        "`auto`: 1e-2 where `balance_rate: auto` is 0, else 0.",
    )
    z_loss: float = Field(
        1e-3,
        ge=0,
        description="Weight of the squared logsumexp of router logits (ST-MoE), a mean over all tokens; 0: off.",
    )


class Mamba(Strict):
    """The state-space part of a hybrid model's shape (Mamba-2)."""

    attention_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        description="Layers, counted from 0, that have attention; all others have a state space (Mamba-2)."
    )
    heads: int = Field(ge=1, description="Heads of a state-space layer.")
    head_dim: CountOrAuto = Field("auto", description="Width of one head; `auto`: 2 dim / heads.")
    state_dim: int = Field(128, ge=1, description="Numbers that a head remembers for each number of its width.")
    groups: int = Field(1, ge=1, description="Heads share what is written to the state and how it is read, by groups.")
    conv_width: int = Field(4, ge=1, description="Tokens that the causal convolution before the state looks at.")
    conv_bias: bool = Field(True, description="Bias on the convolution.")
    proj_bias: bool = Field(False, description="Bias on the projections in and out.")


class Mla(Strict):
    """Multi-head latent attention (DeepSeek): keys and values of all heads are made of one short vector a token."""

    q_lora_rank: int | None = Field(
        None, ge=1, description="Width of the short vector that queries are made of; none: of the stream itself."
    )
    kv_lora_rank: int = Field(ge=1, description="Width of the short vector that keys and values are made of.")
    qk_nope_head_dim: int = Field(ge=1, description="Numbers of a query's head that positions do not turn.")
    qk_rope_head_dim: int = Field(ge=2, description="Numbers that they turn; of the keys all heads share them.")
    v_head_dim: int = Field(ge=1, description="Width of a head's values.")
    rope_interleave: bool = Field(True, description="Positions turn neighbours in a head; else its two halves.")


class Model(Strict):
    """The decoder: Llama 2/3, Qwen 2/3, Mistral, Bamba, Gemma 3 and DeepSeek-V3 are all settings of this one shape."""

    preset: str | None = Field(None, description="A named shape (`shoal show --presets` lists them) to start from.")
    weights: LocalPath | None = Field(
        None,
        description="What to start from, shape and weights: a Hugging Face folder, a checkpoint, or a run's folder.",
    )
    hf: LocalPath | None = Field(
        None,
        description="A Hugging Face folder of any causal model: its class in transformers is trained as it is "
        "(docs/guide/hf-models.md). For the families that Shoal has, `weights` is faster and knows more meshes.",
    )
    hf_config: Annotated[str, Field(max_length=1 << 18)] | None = Field(
        None, description="What config.json of `hf` says; written by Shoal when a run begins."
    )
    family: Literal[
        "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "dots1", "bamba", "gemma3_text", "deepseek_v3"
    ] = Field("llama", description="The Hugging Face architecture that weights are read from and written to.")
    vocab_size: CountOrAuto = Field(
        "auto", description="Rows of the embedding; `auto`: the tokenizer's, rounded up to 64."
    )
    dim: int = Field(256, ge=8, description="Width of the residual stream.")
    layers: int = Field(4, ge=1, description="Decoder blocks.")
    heads: int = Field(4, ge=1, description="Query heads.")
    kv_heads: CountOrAuto = Field(
        "auto", description="Key and value heads (grouped-query attention); `auto`: as many as heads."
    )
    head_dim: CountOrAuto = Field("auto", description="Width of one head; `auto`: dim / heads.")
    ffn_dim: CountOrAuto = Field("auto", description="Hidden width of the SwiGLU; `auto`: 8/3 dim, rounded up to 64.")
    max_seq_len: int = Field(4096, ge=1, description="Longest sequence the model is meant for; written to config.json.")
    norm_eps: float = Field(1e-5, gt=0, description="Added to the variance in RMSNorm.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(None, description="Stretch of the rotary frequencies.")
    qk_norm: bool = Field(False, description="RMSNorm on queries and keys of each head (Qwen 3).")
    qkv_bias: bool = Field(False, description="Bias on the query, key and value projections (Qwen 2).")
    out_bias: bool = Field(False, description="Bias on the attention output projection.")
    mlp_bias: bool = Field(False, description="Bias on the three MLP projections.")
    tie_embeddings: bool = Field(False, description="The output head reuses the embedding.")
    sliding_window: int | None = Field(
        None, ge=1, description="Each token sees at most this many tokens, itself the last."
    )
    full_attention_layers: int = Field(
        0, ge=0, description="Leading layers that ignore `sliding_window` (Qwen 2's max_window_layers)."
    )
    full_attention_every: int | None = Field(
        None, ge=2, description="Every so-many-th layer ignores `sliding_window` (Gemma 3: 6)."
    )
    sliding_rope_theta: float | None = Field(
        None, gt=0, description="Base of the rotary frequencies in layers with a window (Gemma 3); none: `rope_theta`."
    )
    query_pre_attn_scalar: int | None = Field(
        None, ge=1, description="Scores are divided by the root of this number (Gemma 3); none: `head_dim`."
    )
    init: Literal["auto", "normal", "megatron", "torchtitan", "scaled", "zero"] = Field(
        "auto", description="Rule for the start values (docs/guide/models.md); `auto`: what learns fastest."
    )
    init_std: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto",
        description="Standard deviation of the start values, where the rule asks for one; `auto`: 0.02. A number with "
        "`init: auto` means `normal`.",
    )
    experts: Experts | None = Field(None, description="Makes the model a mixture of experts.")
    mamba: Mamba | None = Field(None, description="Makes the model a hybrid of state-space layers and attention.")
    mla: Mla | None = Field(
        None, description="Makes attention latent: keys and values out of one short vector a token."
    )
