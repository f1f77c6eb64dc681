"""Mamba-2 (arXiv:2405.21060): a state for each head that decays and takes in a token at a time, computed in chunks.

    h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]        y[t] = c[t] h[t] + d x[t]

Inside a chunk of tokens that is a masked product, as attention is; between chunks the states travel. The state, its
decays and the norm are float32 whatever comes in. A document begins with an empty state and sees no token of another
through the convolution. As transformers' Bamba computes it; of its one input matrix and one convolution each part is a
parameter of its own here, so that heads can be dealt out to processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.spec.mixers import mamba as facts
from shoal.spec.shape import Shape

if TYPE_CHECKING:
    from shoal.model.decoder import Decoder


class Mamba(nn.Module):
    """`part` and `total` are seams: what of a parameter is here, and a sum over the processes that share the heads.
    `convolve` and `scan` are those where a state from before comes in (`shoal.generate.states`)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        m = facts.of(shape)
        inner, states = facts.inner_dim(m), m.groups * m.state_dim
        self.head_dim, self.state_dim = int(m.head_dim), m.state_dim
        self.gate = nn.Linear(shape.dim, inner, bias=m.proj_bias)
        self.x = nn.Linear(shape.dim, inner, bias=m.proj_bias)
        self.b = nn.Linear(shape.dim, states, bias=m.proj_bias)
        self.c = nn.Linear(shape.dim, states, bias=m.proj_bias)
        self.dt = nn.Linear(shape.dim, m.heads, bias=m.proj_bias)
        self.x_conv = Convolution(inner, m.conv_width, m.conv_bias)
        self.b_conv = Convolution(states, m.conv_width, m.conv_bias)
        self.c_conv = Convolution(states, m.conv_width, m.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(m.heads))
        self.a_log = nn.Parameter(torch.empty(m.heads))
        self.d = nn.Parameter(torch.empty(m.heads))
        self.norm = Scale(inner, shape.norm_eps)
        self.out = nn.Linear(inner, shape.dim, bias=m.proj_bias)
        self.cuts = {weight.name: weight.cut for weight in facts.weights(shape)}
        self.part: Callable[[Tensor], Tensor] = whole
        self.total: Callable[[Tensor], Tensor] = whole
        self.convolve: Callable[..., Tensor] = convolve
        self.scan: Callable[..., Tensor] = scan

    def forward(self, x: Tensor, beside: tuple[Tensor | None]) -> Tensor:
        """x [batch, seq, dim]; beside it the numbers of the documents [batch, seq], None meaning one a row."""
        (documents,) = beside
        gate, dt = self._product(self.gate, x), self._product(self.dt, x)
        inner = self._convolved(self.x_conv, self._product(self.x, x), documents)  # [batch, seq, heads * head_dim]
        b = self._convolved(self.b_conv, self._product(self.b, x), documents)  # [batch, seq, groups * state]
        c = self._convolved(self.c_conv, self._product(self.c, x), documents)
        with torch.autocast(x.device.type, enabled=False):
            heads = inner.float().unflatten(-1, (-1, self.head_dim))
            steps = F.softplus(dt.float() + self.part(self.dt_bias).float())  # [batch, seq, heads]
            a = -self.part(self.a_log).float().exp()
            b, c = (t.float().unflatten(-1, (-1, self.state_dim)) for t in (b, c))
            y = self.scan(heads, steps, a, b, c, documents) + self.part(self.d).float()[:, None] * heads
            y = self._normed(y.flatten(-2) * F.silu(gate.float())).to(gate.dtype)
        return self.out(y)

    def _product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.part(linear.weight), None if linear.bias is None else self.part(linear.bias))

    def _convolved(self, conv: Convolution, x: Tensor, documents: Tensor | None) -> Tensor:
        bias = None if conv.bias is None else self.part(conv.bias)
        return F.silu(self.convolve(x, self.part(conv.weight), bias, documents))

    def _normed(self, x: Tensor) -> Tensor:
        """RMSNorm over all heads, those of other processes too."""
        square = self.total(x.square().sum(-1, keepdim=True)) / self.norm.width
        return x * torch.rsqrt(square + self.norm.eps) * self.part(self.norm.weight).float()


class Convolution(nn.Module):
    """Each channel with a few numbers of its own: [channels, width]."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None


class Scale(nn.Module):
    """The weight of a norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.width, self.eps = width, eps


def whole(tensor: Tensor) -> Tensor:
    return tensor


def beside(decoder: Decoder, positions: Tensor, documents: Tensor | None) -> Callable[[int], tuple[Any, ...]]:
    return lambda layer: (documents,)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    """x [batch, seq, channels], each token with the few before it in its document; weight [channels, width], the last
    of a row for the token itself."""
    seq, width = x.shape[1], weight.shape[1]
    weight = weight.to(x.dtype)
    y = x * weight[:, -1]
    for back in range(1, min(width, seq)):
        before = F.pad(x[:, :-back], (0, 0, back, 0))
        if documents is not None:
            before = before * F.pad(documents[:, back:] == documents[:, :-back], (back, 0))[..., None]
        y = y + before * weight[:, -1 - back]
    return y if bias is None else y + bias.to(x.dtype)


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None) -> Tensor:
    """y [batch, seq, heads, head_dim] as x; dt [batch, seq, heads] above 0, a [heads] below; b, c [batch, seq, groups,
    state]. Documents are numbered in order along a row.

    Letters below: b batch, n chunks, l and m tokens of a chunk, g groups, h heads of a group, p head_dim, s state.
    """
    seq, heads, groups = x.shape[1], x.shape[2], b.shape[2]
    chunk = min(facts.CHUNK, seq)
    fill, each = -seq % chunk, (groups, heads // groups)

    def cut(t: Tensor) -> Tensor:
        """[batch, seq, …] to [batch, chunks, tokens, …]; what fills the last chunk has steps of 0 and no effect."""
        return F.pad(t, (0, 0) * (t.ndim - 2) + (0, fill)).unflatten(1, (-1, chunk))

    taken = cut(x * dt[..., None]).unflatten(3, each)  # b n l g h p
    decays = cut(dt * a).unflatten(3, each).permute(0, 1, 3, 4, 2)  # b n g h l, all below 0
    b, c = cut(b), cut(c)  # b n l g s
    numbers = None if documents is None else _chunked_numbers(documents, fill, chunk)  # b n l
    between = _sums(decays)  # b n g h l m: from after m to l
    if numbers is not None:
        apart = numbers[..., :, None] != numbers[..., None, :]
        between = between.masked_fill(apart[:, :, None, None], -math.inf)
    between = between.exp()
    scores = torch.einsum("bnlgs,bnmgs->bnglm", c, b)
    y = torch.einsum("bnghlm,bnmghp->bnlghp", scores[:, :, :, None] * between, taken)
    if taken.shape[1] > 1:
        # What each chunk leaves of its last document, carried to the ends of the later ones.
        left = torch.einsum("bnmgs,bnmghp->bnghps", b, taken * between[..., -1, :].permute(0, 1, 4, 2, 3)[..., None])
        over = _sums(decays.sum(-1).permute(0, 2, 3, 1))  # b g h n m: chunks
        since = decays.cumsum(-1)  # b n g h l
        if numbers is not None:
            ends = numbers[:, :, -1]
            over = over.masked_fill((ends[:, :, None] != ends[:, None, :])[:, None, None], -math.inf)
            other = numbers[:, 1:] != ends[:, :-1, None]
            since = since.masked_fill(F.pad(other, (0, 0, 1, 0))[:, :, None, None], -math.inf)
        states = torch.einsum("bghnm,bmghps->bnghps", over.exp(), left)[:, :-1]
        carried = torch.einsum("bnlgs,bnghps->bnlghp", c[:, 1:], states)
        carried = carried * since[:, 1:].exp().permute(0, 1, 4, 2, 3)[..., None]
        y = y + F.pad(carried, (0, 0) * 4 + (1, 0))
    return y.flatten(1, 2).flatten(2, 3)[:, :seq]


def _sums(steps: Tensor) -> Tensor:
    """[…, n] to […, n, n]: at (i, j) the sum of those after j up to i; -inf where j is later. Each is summed by itself:
    a difference of two long sums would lose the digits of a short one."""
    n = steps.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=steps.device).tril(-1)
    sums = steps[..., None].expand(*steps.shape, n).masked_fill(~later, 0.0).cumsum(-2)
    return sums.masked_fill(~(later | torch.eye(n, dtype=torch.bool, device=steps.device)), -math.inf)


def _chunked_numbers(documents: Tensor, fill: int, chunk: int) -> Tensor:
    """[batch, chunks, tokens]; the last document goes on in what fills the last chunk."""
    last = documents[:, -1:].expand(-1, fill)
    return torch.cat((documents, last), 1).unflatten(1, (-1, chunk))


def _inverse_softplus(u: Tensor) -> Tensor:
    """Steps spread evenly by their logarithm between 0.001 and 0.1, as mamba_ssm begins with."""
    dt = (math.log(1e-3) + u * math.log(100.0)).exp()
    return dt + torch.log(-torch.expm1(-dt))


# Start values that are no matrices', made of numbers spread evenly over [0, 1), by the name of the parameter or of its
# module: mamba_ssm's. (transformers begins with decays of 1 to `heads` and steps of 1.3, which forget at once.)
STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dt_bias": _inverse_softplus,
    "a_log": lambda u: (1 + 15 * u).log(),
    "d": torch.ones_like,
    **dict.fromkeys(("x_conv", "b_conv", "c_conv"), lambda u: (2 * u - 1) / math.sqrt(u.shape[-1])),
}
