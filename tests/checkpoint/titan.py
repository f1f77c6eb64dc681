"""A Llama 3 as torchtitan (and Meta) writes it: its names, and rotary pairs that are neighbours. A reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.spec.model import Model

MODEL = Model(vocab_size=61, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=40, rope_theta=500_000.0, norm_eps=1e-5)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        groups = q.shape[2] // k.shape[2]
        q, k = turned(q, turns), turned(k, turns).repeat_interleave(groups, 2)
        v = v.repeat_interleave(groups, 2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(-2))
        return out


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Each two neighbours are a complex number; multiplied by e^(i angle)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention = Attention(model.dim, model.heads, int(model.kv_heads))
        self.feed_forward = FeedForward(model.dim, int(model.ffn_dim))
        self.attention_norm = nn.RMSNorm(model.dim, eps=model.norm_eps)
        self.ffn_norm = nn.RMSNorm(model.dim, eps=model.norm_eps)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    def __init__(self, model: Model = MODEL) -> None:
        super().__init__()
        self.model = model
        self.tok_embeddings = nn.Embedding(int(model.vocab_size), model.dim)
        self.layers = nn.ModuleDict({str(i): Block(model) for i in range(model.layers)})
        self.norm = nn.RMSNorm(model.dim, eps=model.norm_eps)
        self.output = nn.Linear(model.dim, int(model.vocab_size), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        head_dim = self.model.dim // self.model.heads
        speeds = 1.0 / self.model.rope_theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), speeds)  # [seq, head_dim / 2]
        turns = torch.polar(torch.ones_like(angles), angles)
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, turns)
        logits: Tensor = self.output(self.norm(x))
        return logits


def titan(seed: int) -> Titan:
    """Large weights, so that attention is far from uniform and a wrong angle shows."""
    torch.manual_seed(seed)
    model = Titan()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3) if p.ndim > 1 else nn.init.uniform_(p, 0.5, 1.5)
    return model
