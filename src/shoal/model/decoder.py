"""The decoder: Llama 2 and 3, Qwen 2 and 3 and Mistral are settings of this one module.

Plain PyTorch: no parallelism here. FSDP and DDP wrap it from outside and fire on `forward`, which is therefore the
only way in: tokens to logits, or tokens and targets to the summed loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import SpecError
from shoal.model.attention import Attention, attention_mask
from shoal.model.head import Head
from shoal.model.init import init_weights
from shoal.model.norm import RMSNorm
from shoal.model.rope import Rope
from shoal.spec.shape import Shape


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=shape.mlp_bias)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [batch, seq, dim]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.ffn(self.ffn_norm(x))  # [batch, seq, dim]


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        _check(shape)
        self.shape = shape
        self.rope = Rope(shape)
        self.embed = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim, eps=shape.norm_eps)
        self.head = Head(shape)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Logits [batch, seq, vocab], or with targets the sum of cross-entropy over those that are not -100.

        All arguments are [batch, seq]. Without positions a row counts from 0; without documents it is one document.
        """
        hidden = self.hidden(tokens, positions, documents)
        tied = self.embed.weight if self.shape.tie_embeddings else None
        return self.head(hidden, tied, targets)

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """What the head reads: [batch, seq, dim]."""
        seq, device = tokens.shape[1], tokens.device
        if positions is None:
            positions = torch.arange(seq, device=device)[None]
        # Made once and shared by all blocks.
        cos, sin = self.rope(positions)
        full = attention_mask(documents, seq, None, device)
        window = self.shape.sliding_window
        sliding = full if window is None else attention_mask(documents, seq, window, device)
        x = self.embed(tokens)  # [batch, seq, dim]
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, full if i < self.shape.full_attention_layers else sliding)
        return self.norm(x)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter, sharded or not, with numbers that depend on the seed and its name alone."""
        init_weights(self, self.shape.init_std, seed)


def _check(shape: Shape) -> None:
    """What no Decoder can be built from. The spec says the same earlier; a Shape may come from elsewhere."""
    if shape.experts is not None:
        raise SpecError(
            "model.experts asks for a mixture of experts, which Shoal plans but does not train yet: remove it."
        )
    if shape.heads % shape.kv_heads:
        raise SpecError(f"model.heads ({shape.heads}) is no multiple of model.kv_heads ({shape.kv_heads}).")
    if shape.head_dim % 2:
        raise SpecError(f"model.head_dim ({shape.head_dim}) is odd, and rotary positions turn pairs.")
