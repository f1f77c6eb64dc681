"""The model as costs see it: widths and counts, of any decoder, also of one that Shoal does not train."""

from __future__ import annotations

from dataclasses import dataclass

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
        )

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_params(self) -> int:
        """Of a layer."""
        return 2 * self.dim * (self.q_dim + self.kv_dim)

    @property
    def dense_params(self) -> int:
        """Of a dense feed-forward."""
        return self.matrices * self.dim * self.ffn_dim

    @property
    def expert_params(self) -> int:
        return self.matrices * self.dim * self.expert_dim

    @property
    def params(self) -> int:
        """Matrices alone: norms and biases weigh nothing here."""
        return self._of_layers(self.experts) + self.vocab * self.dim * (1 if self.tied else 2)

    def flops_per_token(self, seq: int, causal: bool) -> float:
        """Training FLOPs of one token, as `Shape.flops_per_token` counts them."""
        attention = 12 * self.layers * self.q_dim * seq
        return 6 * (self._of_layers(self.top_k) + self.vocab * self.dim) + (attention / 2 if causal else attention)

    def _of_layers(self, experts: int) -> int:
        dense = self.layers - self.sparse_layers
        sparse = self.expert_params * (experts + self.shared) + self.dim * self.experts
        return self.layers * self.attention_params + dense * self.dense_params + self.sparse_layers * sparse
