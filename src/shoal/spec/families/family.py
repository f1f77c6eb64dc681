"""What transformers takes for granted in one architecture: all that Shoal knows of a family beside the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.spec.families.verdicts import Verdict


@dataclass(frozen=True)
class Window:
    """How its class slides. A family without one sees everything."""

    leading: int | None = None  # the default of `max_window_layers`; None: slides in every layer or in none
    every: int | None = None  # the default of `sliding_window_pattern`: each so-many-th layer sees all
    switched: bool = False  # a window is one only with `use_sliding_window`


@dataclass(frozen=True)
class Routed:
    """How its class holds experts."""

    counts: tuple[str, str]  # names of their number, the class's own first
    defaults: Mapping[str, int]  # what the class takes for left out; nothing where it has to be said
    dense: Literal["none", "first", "listed"]  # how it says which leading layers have none
    holds_bias: bool = False  # has a place for the bias that picks experts
    shared: bool = False
    groups: bool = False  # picks within groups, and scales what the experts say
    scale: float = 1.0  # the default of `routed_scaling_factor`
    normalized: bool = False  # the default of `norm_topk_prob`
    score: Literal["softmax", "sigmoid"] = "softmax"
    always_normalized: bool = False
    width: str = "moe_intermediate_size"


@dataclass(frozen=True)
class Family:
    architecture: str
    fields: Mapping[str, Verdict]  # of its config.json, beside those that all have (`shoal.spec.hf.fields`)
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / heads
    has_head_dim: bool = True  # whether the class has that key; it is read wherever it is
    sliding_window: int | None = None
    window: Window | None = None
    max_position: int = 2048
    attention_bias: bool = False  # has the key `attention_bias`, which puts one on q, k, v and the output
    mlp_bias: bool = False  # has the key `mlp_bias`
    biases: tuple[bool, bool] | None = None  # on q, k, v and on the output, where the class leaves no choice
    qk_norm: bool = False
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    sliding_theta: float | None = None  # of layers that slide, where these have a base of their own
    rotary: float = 1.0  # of a head, the part that positions turn
    routed: Routed | None = None
    mamba: bool = False  # has state-space layers
    mla: Mapping[str, int] | None = None  # of latent attention, what its class takes for left out
    act: Literal["silu", "gelu_tanh"] = "silu"  # of the gate of a feed-forward
    act_key: str = "hidden_act"
    tied: bool = False  # the default of `tie_word_embeddings`
    query_scalar: int | None = None  # the default of `query_pre_attn_scalar`, where the class has that key
    centred_norms: bool = False  # the weight of a norm is what it has more than one
    post_norms: bool = False  # what a mixer and a feed-forward say is normed as well
    scaled_embedding: bool = False  # by the root of the width
    heads_divide: bool = False  # its class wants a width that is a multiple of the heads, whatever head_dim says
    parts: Mapping[str, str] = field(default_factory=dict)  # modules of the model that its class calls otherwise
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # modules that are one in its class, in order

    @property
    def experts(self) -> bool:
        return self.routed is not None
