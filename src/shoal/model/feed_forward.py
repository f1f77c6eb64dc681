"""The feed-forward half of a block: SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, dim: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=bias)
        self.up = nn.Linear(dim, width, bias=bias)
        self.down = nn.Linear(width, dim, bias=bias)
        self.widen: Callable[[FeedForward, Tensor], Sequence[Tensor]] = widen

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.widen(self, x)
        return self.down(F.silu(gate) * up)  # [..., dim]


def widen(ffn: FeedForward, x: Tensor) -> Sequence[Tensor]:
    return ffn.gate(x), ffn.up(x)
