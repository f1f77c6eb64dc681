"""A mixture of experts in the place of a block's feed-forward: each token passes through the few experts that a router
picks for it, and through the shared ones.

Plain PyTorch on one process. `MixtureOfExperts.exchange` is the seam where expert parallelism sends tokens to the
processes that hold their experts, and `Experts.compute` the one where it takes its own part of the stacked weights.

Balance comes from a bias on each expert's score that decides who is picked and never how much an expert's word counts
(arXiv:2408.15664): no loss pulls against the one that matters. Where a bias cannot leave with the model, a loss
balances instead (arXiv:2101.03961), by the loads of a whole batch (arXiv:2501.11873), the one before. After each
optimizer step the loads of all processes are summed, and `shoal.model.loads.apply_loads` hands them on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.devices.on_torch import groups_products
from shoal.model.feed_forward import FeedForward
from shoal.spec.model import Experts as Spec
from shoal.spec.shape import Shape

LOGITS_PER_SCORE = 4.0  # a sigmoid's slope at zero is a quarter: so one rate of balancing does for both scores
ALIGNMENT = 16  # bytes that a row must be a multiple of for the grouped kernels


class Router(nn.Linear):
    """Scores tokens in float32 whatever they come in: rounding here changes which experts are picked."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())  # [tokens, experts]


class Experts(nn.Module):
    """SwiGLU experts, their matrices stacked."""

    def __init__(self, count: int, dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(count, width, dim))
        self.up = nn.Parameter(torch.empty(count, width, dim))
        self.down = nn.Parameter(torch.empty(count, dim, width))
        self.compute: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = swiglu

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [n, dim] sorted by expert, counts [experts here] how many rows each has; to [n, dim]."""
        return self.compute(x, counts, self.gate, self.up, self.down)


class MixtureOfExperts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        e = shape.experts
        assert e is not None
        self.spec = e
        self.router = Router(shape.dim, e.count, bias=False)
        self.experts = Experts(e.count, shape.dim, e.ffn_dim)
        self.shared = FeedForward(shape.dim, e.shared * e.ffn_dim) if e.shared else None
        self.exchange: Callable[[Experts, Tensor, Tensor], Tensor] = through_experts
        self.sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
        # Targets that a counted token stands for in the losses below: targets / counted tokens, of the whole batch. All
        # gradients are divided by the targets in the end; so these losses are means over the counted tokens.
        self.token_weight = 1.0
        self.bias: Tensor
        self.excess: Tensor | None
        self.load: Tensor
        self.z: Tensor
        self.register_buffer("bias", torch.zeros(e.count, dtype=torch.float32))
        # How much more than the mean each expert had of the batch before: what the balance loss goes by. That of this
        # batch is not known before its last micro-batch; that of the last one is the same on every mesh.
        self.register_buffer("excess", torch.zeros(e.count, dtype=torch.float32) if e.balance_loss else None)
        # Since the last `apply_loads`: tokens to each expert, and the sum over tokens of what the z-loss squares. Never
        # on the meta device: no checkpoint brings them to a model that only loads its weights.
        self.register_buffer("load", torch.zeros(e.count, dtype=torch.int64, device="cpu"), persistent=False)
        self.register_buffer("z", torch.zeros((), dtype=torch.float32, device="cpu"), persistent=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """`padding` [batch, seq]: which tokens only fill a row; they are computed, and count nowhere."""
        tokens = x.flatten(0, -2)  # [tokens, dim]
        y = self.routed(tokens, None if padding is None else ~padding.flatten())
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view(x.shape)

    @torch.compiler.disable  # a graph whose sizes depend on the tokens would be compiled again and again
    def routed(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """What the picked experts make of the tokens [tokens, dim], weighed and summed. `counts` [tokens]: which of
        them count; None: all."""
        logits = self.router(x)  # [tokens, experts]
        chosen, weights = route(logits, self.bias, self.spec, self.sigmoid)
        y = self.exchange(self.experts, x, chosen)  # [tokens, top_k, dim]
        with torch.autocast(x.device.type, enabled=False):
            y = (weights.to(y.dtype)[:, None, :] @ y).squeeze(1)  # [tokens, dim]
        if self.training:
            squares = _sum(levels(logits, self.spec.score).square(), counts)
            if _first_time():
                self.load += counted(chosen, self.spec.count, counts)
                self.z += squares.detach()
            if y.requires_grad and (self.spec.z_loss or self.excess is not None):
                y = attach(y, self.token_weight * self._own_loss(logits, squares, counts))
        return y

    def _own_loss(self, logits: Tensor, squares: Tensor, counts: Tensor | None) -> Tensor:
        """What is held against the router besides the loss of the model, summed over the tokens that count."""
        loss = self.spec.z_loss * squares
        if self.excess is None:
            return loss
        return loss + float(self.spec.balance_loss) * _sum(shares(logits, self.spec.score) @ self.excess, counts)


def route(
    logits: Tensor, bias: Tensor, spec: Spec, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, both [tokens, top_k]; logits [tokens, experts], bias [experts]."""
    score = spec.score
    scores = logits.softmax(-1) if score == "softmax" else sigmoid(logits)
    # Shares of one shrink with the number of experts and lie dense near zero, where a bias that moves one expert moves
    # many: of 64 experts the busiest kept 1.4 to 2.9 times the mean. On the logits it is 1.2, what sampling leaves.
    eager = logits + LOGITS_PER_SCORE * bias if score == "softmax" else scores + bias
    eager = eager.detach()
    if spec.groups > 1:
        eager = within_groups(eager, spec.groups, spec.top_groups)
    chosen = eager.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
    return chosen, weights if spec.routed_scale == 1.0 else weights * spec.routed_scale


def within_groups(eager: Tensor, groups: int, top_groups: int) -> Tensor:
    """[tokens, experts], with nothing to be picked outside of a token's best groups, those whose two best experts have
    the largest sum (DeepSeek-V3, arXiv:2412.19437)."""
    best = eager.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)  # [tokens, groups]
    within = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(top_groups, dim=-1).indices, True)
    return eager.masked_fill(~within.repeat_interleave(eager.shape[-1] // groups, dim=-1), -math.inf)


def levels(logits: Tensor, score: str) -> Tensor:
    """What the z-loss squares, [tokens]: ST-MoE's logsumexp (arXiv:2202.08906).

    A softmax does not notice where the level of a token's logits lies, sigmoids do: theirs is counted from logits of
    zero. Else the z-loss pulls every score towards zero (seen: logsumexp from 2.8 to 0.4 in 100 steps), where biases
    of the same size weigh more.
    """
    level = logits.logsumexp(-1)
    return level if score == "softmax" else level - math.log(logits.shape[-1])


def shares(logits: Tensor, score: str) -> Tensor:
    """Scores as shares of one, [tokens, experts]: what the balance loss moves."""
    if score == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _sum(values: Tensor, counts: Tensor | None) -> Tensor:
    return values.sum() if counts is None else (values * counts).sum()


def through_experts(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    """Each token [tokens, dim] through its experts [tokens, top_k], all of them here: [tokens, top_k, dim]."""
    top_k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # of the (token, expert) pairs, by expert
    counts = counted(chosen, experts.gate.shape[0])
    y = experts(spread(x, order, top_k), counts)
    return spread(y, inverse(order)).unflatten(0, (-1, top_k))


def counted(chosen: Tensor, experts: int, counts: Tensor | None = None) -> Tensor:
    """How many tokens, of those that count, go to each expert: [experts]. Not bincount, which makes a GPU wait for the
    host."""
    flat = chosen.flatten()
    ones = torch.ones_like(flat) if counts is None else counts[:, None].expand_as(chosen).flatten().to(flat.dtype)
    return flat.new_zeros(experts).scatter_add_(0, flat, ones)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another."""
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return back


def spread(x: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Row `order[i] // copies` of x [rows, dim] in place i, for a permutation `order` of [rows * copies].

    The gradient is gathered too, where indexing would scatter: as fast, and the same bits every time.
    """
    out: Tensor = _Spread.apply(x, order, copies)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        grad = grad.index_select(0, inverse(order))
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad, None, None


def swiglu(x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows [n, dim] sorted by expert through their SwiGLU; counts [experts] says where one's rows end."""
    device = x.device.type
    if torch.is_autocast_enabled(device):  # which knows nothing of the grouped product
        dtype = torch.get_autocast_dtype(device)
        x, gate, up, down = (t.to(dtype) for t in (x, gate, up, down))
    with torch.autocast(device, enabled=False):
        if has_grouped(x, gate):
            return _grouped(x, counts, gate, up, down)
        return _one_by_one(x, counts, gate, up, down)


def has_grouped(x: Tensor, gate: Tensor) -> bool:
    """Whether torch multiplies all experts in one kernel: bfloat16 on a GPU of sm80 on, rows of whole 16 bytes.

    The CPU has it too, but no faster than the loop. The number of rows of an expert is free: rows lie one after the
    other in both passes, so an expert's first one is always aligned.
    """
    if x.dtype != torch.bfloat16 or not groups_products(x.device):
        return False
    return x.shape[0] > 0 and all(width * x.element_size() % ALIGNMENT == 0 for width in gate.shape[1:])


def _grouped(x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    ends = counts.cumsum(0).to(torch.int32)
    gate, up, down = (_Idle.apply(stack, counts) for stack in (gate, up, down))
    multiply = torch._grouped_mm  # torch.nn.functional.grouped_mm is this one
    hidden = F.silu(multiply(x, gate.mT, offs=ends)) * multiply(x, up.mT, offs=ends)  # [n, width]
    return multiply(hidden, down.mT, offs=ends)


class _Idle(torch.autograd.Function):
    """A stack as it is, whose gradient is zero for experts without tokens. The grouped product owes them that and does
    not pay on every GPU: on Blackwell it leaves what lay in memory (pytorch/pytorch#172439)."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors
        return grad.masked_fill((counts == 0)[:, None, None], 0.0), None


def _one_by_one(x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    # An expert without tokens multiplies no rows: its gradient is zero, not missing, so that every process reduces it.
    # unbind, because indexing would make a gradient of the whole stack for each expert.
    parts = x.split(counts.tolist())
    triples = zip(parts, gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(rows, g)) * F.linear(rows, u), d) for rows, g, u, d in triples])


def attach(y: Tensor, extra: Tensor) -> Tensor:
    """y, whose backward pass also takes the gradient of the loss `extra`. The value of `extra` is reported nowhere.

    Its gradient comes with a factor of one: a backward pass is of the loss summed over targets.
    """
    out: Tensor = _Attach.apply(y, extra)
    return out


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, extra: Tensor) -> Tensor:
        ctx.like = extra.new_ones(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.like


def _first_time() -> bool:
    """Whether this is a forward pass, and not one that a backward pass repeats (recomputation)."""
    return torch._C._current_graph_task_id() == -1
