"""The model as costs see it: widths and counts, of any decoder, also of one that Shoal does not train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.spec.mixers import mamba
from shoal.spec.shape import Shape


@dataclass(frozen=True)
class Net:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int  # of a dense layer
    matrices: int  # of a feed-forward: 3 where it is gated
    vocab: int
    tied: bool
    experts: int = 0
    top_k: int = 0
    expert_dim: int = 0  # width of one expert
    shared: int = 0  # experts that see every token
    dense_layers: int = 0  # of a mixture of experts
    # Of layers that have another mixer than attention: how many, and the widths of their products in and out.
    other_layers: int = 0
    other_in: int = 0
    other_out: int = 0
    other_bytes: float = 0.0  # through memory for each token of such a layer, forwards
    # Of latent attention: what its matrices weigh of those that such widths would have, and the width of its values.
    mixer_share: float = 1.0
    v_head_dim: int = 0  # 0: as keys

    @staticmethod
    def of(shape: Shape) -> Net:
        e = shape.experts
        sparse = () if e is None else (e.count, e.top_k, e.ffn_dim, e.shared, e.dense_layers)
        return Net(
            shape.layers,
            shape.dim,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.ffn_dim,
            3,
            shape.vocab_size,
            shape.tie_embeddings,
            *sparse,
            **(_other(shape) | _latent(shape)),
        )

    @property
    def q_dim(self) -> float:
        """Of the product out of a mixer: attention's, or of a hybrid the mean over layers."""
        own = self.heads * self.head_dim
        return own + (self.other_out - own) * self._other_share

    @property
    def kv_dim(self) -> float:
        """As `q_dim`: what the product into a mixer has more than that out of it, halved."""
        own = self.kv_heads * self.head_dim
        return own + ((self.other_in - self.other_out) / 2 - own) * self._other_share

    @property
    def attention_share(self) -> float:
        """Of the layers, those that attend."""
        return 1 - self._other_share

    @property
    def attended(self) -> float:
        """Of the width that `q_dim` states, what attends."""
        return self.heads * self.head_dim / self.q_dim

    @property
    def mixing_bytes(self) -> float:
        """Through memory for each token and layer, of mixers that do not attend."""
        return self.other_bytes * self._other_share

    @property
    def _other_share(self) -> float:
        return self.other_layers / self.layers

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_params(self) -> float:
        """Of a layer's mixer."""
        return 2 * self.dim * (self.q_dim + self.kv_dim) * self.mixer_share

    @property
    def dense_params(self) -> int:
        """Of a dense feed-forward."""
        return self.matrices * self.dim * self.ffn_dim

    @property
    def expert_params(self) -> int:
        return self.matrices * self.dim * self.expert_dim

    @property
    def params(self) -> float:
        """Matrices alone: norms and biases weigh nothing here."""
        return self._of_layers(self.experts) + self.vocab * self.dim * (1 if self.tied else 2)

    def flops_per_token(self, seq: int, causal: bool) -> float:
        """Training FLOPs of one token, as `Shape.flops_per_token` counts them."""
        both = self.head_dim + (self.v_head_dim or self.head_dim)
        attention = 6 * (self.layers - self.other_layers) * self.heads * both * seq
        return 6 * (self._of_layers(self.top_k) + self.vocab * self.dim) + (attention / 2 if causal else attention)

    def _of_layers(self, experts: int) -> float:
        dense = self.layers - self.sparse_layers
        sparse = self.expert_params * (experts + self.shared) + self.dim * self.experts
        return self.layers * self.attention_params + dense * self.dense_params + self.sparse_layers * sparse


def _latent(shape: Shape) -> dict[str, Any]:
    """Latent attention attends with the widths of plain attention, and multiplies with smaller matrices."""
    if shape.mla is None:
        return {}
    matrices = sum(weight.numbers for weight in shape.mixer_weights(0) if weight.product)
    plain = 2 * shape.dim * (shape.q_dim + shape.kv_dim)
    return {"mixer_share": matrices / plain, "v_head_dim": shape.mla.v_head_dim}


def _other(shape: Shape) -> dict[str, Any]:
    """Layers of a hybrid that do not attend."""
    if shape.mamba is None:
        return {}
    m, chunk = shape.mamba, mamba.CHUNK
    inner, states = mamba.inner_dim(m), m.groups * m.state_dim
    # The squares of a chunk are written and read a few times, and so is what goes in and comes out; all in float32.
    numbers = 4 * chunk * m.heads + (m.conv_width + 12) * (inner + 2 * states)
    return {
        "other_layers": shape.layers_of("mamba"),
        "other_in": 2 * inner + 2 * states + m.heads,
        "other_out": inner,
        "other_bytes": 4.0 * numbers,
    }
