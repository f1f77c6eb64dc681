"""Multi-head latent attention (DeepSeek, arXiv:2405.04434): the keys and values of all heads are made of one short
vector a token, beside a part of the keys that positions turn and that all heads share.

What is attended with is as wide as a query: values are filled up with zeros, which change nothing, so that every kernel
and every way of sharing a sequence that takes attention takes this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.model.attention import attend
from shoal.model.norm import RMSNorm
from shoal.model.rope import rotate, rotate_pairs
from shoal.spec.mixers import mla as facts
from shoal.spec.shape import Shape

EPS = 1e-6  # of the norms inside, whatever model.norm_eps is: so the class of transformers has it


class LatentAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        m = facts.of(shape)
        self.spec, self.score_scale = m, shape.score_scale
        rank, bias = m.q_lora_rank, shape.qkv_bias
        self.q = nn.Linear(shape.dim, shape.q_dim, bias=False) if rank is None else None
        self.q_a = None if rank is None else nn.Linear(shape.dim, rank, bias=bias)
        self.q_norm = None if rank is None else RMSNorm(rank, eps=EPS)
        self.q_b = None if rank is None else nn.Linear(rank, shape.q_dim, bias=False)
        self.kv_a = nn.Linear(shape.dim, m.kv_lora_rank + m.qk_rope_head_dim, bias=bias)
        self.kv_norm = RMSNorm(m.kv_lora_rank, eps=EPS)
        self.kv_b = nn.Linear(m.kv_lora_rank, shape.heads * (m.qk_nope_head_dim + m.v_head_dim), bias=False)
        self.out = nn.Linear(shape.heads * m.v_head_dim, shape.dim, bias=shape.out_bias)
        self.rotate = rotate_pairs if m.rope_interleave else rotate
        self.of_all: Callable[[Tensor], Tensor] = whole  # of [batch, seq here, width]: that of all tokens
        self.attend: Callable[..., Tensor] = attend

    def forward(self, x: Tensor, beside: tuple[Tensor, Tensor, Any]) -> Tensor:
        """x [batch, seq, dim]; beside: as that of attention."""
        cos, sin, mask = beside
        m = self.spec
        plain, turned = self._queries(x).split((m.qk_nope_head_dim, m.qk_rope_head_dim), dim=-1)
        q = torch.cat((plain, self.rotate(turned, cos, sin)), dim=-1)  # [batch, seq, heads, width]
        short, turned = self.kv_a(x).split((m.kv_lora_rank, m.qk_rope_head_dim), dim=-1)
        both = self.kv_b(self.kv_norm(short)).unflatten(-1, (-1, m.qk_nope_head_dim + m.v_head_dim))
        plain, v = both.split((m.qk_nope_head_dim, m.v_head_dim), dim=-1)
        turned = self.rotate(self.of_all(turned)[:, :, None], cos, sin)  # one for all heads
        k = torch.cat((plain, turned.expand(-1, -1, plain.shape[2], -1)), dim=-1)
        if self.score_scale != 1.0:
            q = q * self.score_scale
        filled = F.pad(v, (0, q.shape[-1] - m.v_head_dim)) if m.v_head_dim < q.shape[-1] else v
        mixed = self.attend(q, k, filled, mask, 1)[..., : m.v_head_dim]
        return self.out(mixed.flatten(-2))

    def _queries(self, x: Tensor) -> Tensor:
        """[batch, seq, heads, width]"""
        if self.q is not None:
            q = self.q(x)
        else:
            assert self.q_a is not None
            assert self.q_norm is not None
            assert self.q_b is not None
            q = self.q_b(self.q_norm(self.q_a(x)))
        return q.unflatten(-1, (-1, self.spec.qk_nope_head_dim + self.spec.qk_rope_head_dim))


def whole(part: Tensor) -> Tensor:
    return part
