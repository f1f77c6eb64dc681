"""A state-space layer that goes on from where it stood: the last inputs of its convolutions, and its state."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.model.mamba import Mamba, convolve, scan


@dataclass
class Standing:
    """Of one layer, a row for each place."""

    places: int
    tails: dict[int, Tensor] = field(default_factory=dict)  # by convolution: [places, width - 1, channels]
    state: Tensor | None = None  # [places, heads, head_dim, state]

    def empty(self, place: int) -> None:
        for held in (*self.tails.values(), *([] if self.state is None else [self.state])):
            held[place] = 0.0


class States:
    """The seams of one layer. `rows` says whose tokens come: one row of x for each."""

    def __init__(self, mamba: Mamba, places: int) -> None:
        self.standing = Standing(places)
        self.rows = torch.zeros(0, dtype=torch.int64)
        self._mamba, self._number = mamba, 0

    def begin(self, rows: Tensor) -> None:
        self.rows, self._number = rows, 0
        self._mamba.convolve, self._mamba.scan = self._convolve, self._scan

    def end(self) -> None:
        self._mamba.convolve, self._mamba.scan = convolve, scan

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
        number, before = self._number, weight.shape[1] - 1
        self._number += 1  # x, b and c, in this order
        if number not in self.standing.tails:
            self.standing.tails[number] = x.new_zeros(self.standing.places, before, x.shape[-1])
        tails = self.standing.tails[number]
        longer = torch.cat((tails[self.rows], x), 1)
        tails[self.rows] = longer[:, longer.shape[1] - before :]
        return convolve(longer, weight, bias, None)[:, before:]

    def _scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None) -> Tensor:
        """As `shoal.model.mamba.scan`, from the states on."""
        if self.standing.state is None:
            self.standing.state = x.new_zeros(self.standing.places, *x.shape[2:], b.shape[-1])
        start = self.standing.state[self.rows]  # [batch, heads, head_dim, state]
        each = x.shape[2] // b.shape[2]
        per_head = b.repeat_interleave(each, 2), c.repeat_interleave(each, 2)  # [batch, seq, heads, state]
        decays = dt * a
        y = _one(x, dt, decays, *per_head, start) if x.shape[1] == 1 else None
        if y is not None:
            mixed, self.standing.state[self.rows] = y
            return mixed
        since = decays.cumsum(1)  # [batch, seq, heads]
        carried = torch.einsum("blhs,bhps->blhp", per_head[1], start) * since.exp()[..., None]
        # What comes after each token, summed by itself: a difference of two long sums would lose the digits of a short.
        after = F.pad(decays[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
        left = torch.einsum("blhs,blhp->bhps", per_head[0], x * (dt * after.exp())[..., None])
        self.standing.state[self.rows] = since[:, -1].exp()[..., None, None] * start + left
        return scan(x, dt, a, b, c, None) + carried


def _one(x: Tensor, dt: Tensor, decays: Tensor, b: Tensor, c: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """One token each."""
    taken = (x * dt[..., None])[:, 0]  # [batch, heads, head_dim]
    state = decays[:, 0].exp()[..., None, None] * start + taken[..., None] * b[:, 0, :, None, :]
    return (state @ c[:, 0, :, :, None]).squeeze(-1)[:, None], state
