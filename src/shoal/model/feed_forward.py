"""The feed-forward half of a block: gated, SwiGLU or GeGLU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

ACTS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class FeedForward(nn.Module):
    """Gated (arXiv:2002.05202); by `act`, a key of ACTS."""

    def __init__(self, dim: int, width: int, bias: bool = False, act: str = "silu") -> None:
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=bias)
        self.up = nn.Linear(dim, width, bias=bias)
        self.down = nn.Linear(width, dim, bias=bias)
        self.act = ACTS[act]
        self.widen: Callable[[FeedForward, Tensor], Sequence[Tensor]] = widen

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.widen(self, x)
        return self.down(self.act(gate) * up)  # [..., dim]


def widen(ffn: FeedForward, x: Tensor) -> Sequence[Tensor]:
    return ffn.gate(x), ffn.up(x)
