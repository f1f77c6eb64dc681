"""The shape of a model with nothing left open: what `shoal.model` builds and what a planner counts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from shoal.errors import SpecError
from shoal.spec import balancing
from shoal.spec.families import FAMILIES, Family
from shoal.spec.mixers import KINDS
from shoal.spec.mixers.weight import Weight
from shoal.spec.model import Experts, Mamba, Mla, Model, RopeScaling
from shoal.spec.start_values import STD, rule_of


@dataclass(frozen=True)
class Shape:
    family: str
    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    sliding_window: int | None
    full_attention_layers: int
    full_attention_every: int | None
    sliding_rope_theta: float | None
    query_pre_attn_scalar: int | None
    init: str  # a rule of shoal.spec.start_values
    init_std: float
    experts: Experts | None
    mamba: Mamba | None
    mla: Mla | None

    @property
    def about(self) -> Family:
        """What its family has beside the settings."""
        return FAMILIES[self.family]

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that positions turn."""
        return self.mla.qk_rope_head_dim if self.mla else int(self.head_dim * self.about.rotary)

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by beside the root of a head's width, which is every kernel's own."""
        scalar, rope = self.query_pre_attn_scalar, self.rope_scaling
        if rope is not None and rope.mscale_all_dim is not None and rope.factor > 1:
            return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
        return 1.0 if scalar is None else math.sqrt(self.head_dim / scalar)

    def slides(self, layer: int) -> bool:
        """Whether a layer's attention has a window."""
        if self.sliding_window is None or layer < self.full_attention_layers:
            return False
        return self.full_attention_every is None or (layer + 1) % self.full_attention_every > 0

    @cached_property
    def sliding_layers(self) -> int:
        return sum(self.slides(layer) for layer in range(self.layers))

    @property
    def norms(self) -> int:
        """Of a block, beside those inside its mixer."""
        return 4 if self.about.post_norms else 2

    def mixer(self, layer: int) -> str:
        """The kind of a layer's mixer, of `shoal.spec.mixers.KINDS`."""
        if self.mla is not None:
            return "mla"
        return "attention" if self.mamba is None or layer in self.mamba.attention_layers else "mamba"

    @property
    def attending(self) -> str:
        """The kind of those mixers in which a token looks at others one by one."""
        return "attention" if self.mla is None else "mla"

    @property
    def attending_layers(self) -> int:
        return self.layers_of(self.attending)

    @property
    def flops_per_pair(self) -> int:
        """Training FLOPs of one token and one that it sees, in one layer."""
        return KINDS[self.attending].flops_per_pair(self)

    def layers_of(self, kind: str) -> int:
        """How many layers have a mixer of this kind."""
        return self._counts[kind]

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter(self.mixer(layer) for layer in range(self.layers))

    @property
    def mixers(self) -> tuple[str, ...]:
        """The kinds that there are, each once."""
        return tuple(self._counts)

    def mixer_weights(self, layer: int) -> tuple[Weight, ...]:
        """The parameters of a layer's mixer."""
        return self._weights[self.mixer(layer)]

    @cached_property
    def _weights(self) -> dict[str, tuple[Weight, ...]]:
        # Kept: a planner asks for every layer of every layout.
        return {kind: tuple(KINDS[kind].weights(self)) for kind in self.mixers}

    def sparse(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def params(self) -> int:
        """Parameters, each counted once (a tied head is no second matrix)."""
        head = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return self.vocab_size * self.dim + head + self.dim + self._layers(active=False)

    @property
    def active_params(self) -> int:
        """Parameters that one token passes through; less than `params` only for a mixture of experts."""
        head = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return self.vocab_size * self.dim + head + self.dim + self._layers(active=True)

    def flops_per_token(self, seq_len: int, causal: bool) -> float:
        """Training FLOPs of one token in a window that is one document: 6 a matrix parameter it passes, plus attention
        over `seq_len` tokens. What a step of packed documents computes is in `shoal.spec.flops`.

        `causal=True` counts the half of the attention square that is computed; `False` counts it all, as torchtitan
        does. The embedding is a lookup and counts nothing; the head counts even when tied.
        """
        seen = seq_len / 2 if causal else seq_len
        return self.flops_per_token_seeing(seen * self.attending_layers / self.layers)

    def flops_per_token_seeing(self, seen: float) -> float:
        """The same of a token that sees so many others, on average over layers and tokens."""
        return 6 * self.matrix_params + self.layers * self.flops_per_pair * seen + self.mixing_flops_per_token

    @property
    def mixing_flops_per_token(self) -> int:
        """Training FLOPs of one token in all mixers, whatever it sees, beside the products with weights."""
        return sum(self.layers_of(kind) * KINDS[kind].flops_per_token(self) for kind in self.mixers)

    @property
    def matrix_params(self) -> int:
        """Of the products that one token passes through."""
        return sum(self.layer_params(layer) for layer in range(self.layers)) + self.vocab_size * self.dim

    def layer_params(self, layer: int) -> int:
        """Of the products of one layer that a token passes through."""
        mixer = sum(weight.numbers for weight in self.mixer_weights(layer) if weight.product)
        if not self.sparse(layer):
            return mixer + 3 * self.dim * self.ffn_dim
        e = self.experts
        assert e is not None
        return mixer + 3 * self.dim * e.ffn_dim * (e.top_k + e.shared) + self.dim * e.count

    def _layers(self, active: bool) -> int:
        mixers = sum(weight.numbers for layer in range(self.layers) for weight in self.mixer_weights(layer))
        norms = self.norms * self.dim * self.layers
        dense = 3 * self.dim * self.ffn_dim + (2 * self.ffn_dim + self.dim) * self.mlp_bias
        if self.experts is None:
            return mixers + norms + self.layers * dense
        e = self.experts
        routed = e.top_k if active else e.count
        sparse = 3 * self.dim * e.ffn_dim * (routed + e.shared) + self.dim * e.count
        return mixers + norms + e.dense_layers * dense + (self.layers - e.dense_layers) * sparse


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def shape_of(model: Model, tokenizer_vocab: int | None = None) -> Shape:
    """Close every `auto` of the model. `tokenizer_vocab` is needed only when `vocab_size` is `auto`."""
    vocab = model.vocab_size
    if vocab == "auto":
        if tokenizer_vocab is None:
            raise SpecError("model.vocab_size is `auto` and no prepared data says how large the vocabulary is.")
        vocab = round_up(tokenizer_vocab, 64)
    kv_heads = model.heads if model.kv_heads == "auto" else model.kv_heads
    head_dim = model.dim // model.heads if model.head_dim == "auto" else model.head_dim
    if model.mla is not None:
        head_dim = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
    ffn_dim = round_up(model.dim * 8 // 3, 64) if model.ffn_dim == "auto" else model.ffn_dim
    same = {name: getattr(model, name) for name in Shape.__dataclass_fields__}
    closed = {"vocab_size": vocab, "kv_heads": kv_heads, "head_dim": head_dim, "ffn_dim": ffn_dim}
    start = {"init": rule_of(model)[0], "init_std": STD if model.init_std == "auto" else model.init_std}
    return Shape(**{**same, **closed, **start, "experts": balancing.closed(model), "mamba": _mamba(model)})


def _mamba(model: Model) -> Mamba | None:
    if model.mamba is None or model.mamba.head_dim != "auto":
        return model.mamba
    return model.mamba.model_copy(update={"head_dim": 2 * model.dim // model.mamba.heads})
