"""The feed-forward half of a block: SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, dim: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=bias)
        self.up = nn.Linear(dim, width, bias=bias)
        self.down = nn.Linear(width, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [..., dim]
