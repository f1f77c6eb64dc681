"""The embedding, the head and its loss where each process has some rows of the vocabulary.

Nobody ever has all logits of a token. As in `shoal.model.head` the loss goes over the tokens in chunks and takes their
gradients on the way. Here a chunk is gathered from the stretches of all processes, each computes the logits of its own
rows, and what they need of each other is three numbers a token: the largest logit, the sum of exponentials below it,
the target's logit. One gather of these replaces the two or three all-reduces of Megatron's loss. While they travel the
next chunk's logits are computed, and a chunk's tokens travel while the one before is worked on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shoal.errors import UsageError
from shoal.model.head import NO_TARGET, add_product, as_computed, chunk_tokens, recorded, scaled_grads

# They return at once; what they return is waited for where it is used. torch 2.12 gave them new names, and 2.13 warns
# of the old ones.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def embed(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """This process's stretch [batch, seq / tp, dim] of the embedded tokens [batch, seq]."""
    mesh, rows = _cut(table.weight)
    if tokens.shape[1] % mesh.size():  # unequal stretches would pass for equal ones, and the next collective hang
        raise UsageError(
            f"a sequence of {tokens.shape[1]} tokens cannot be shared equally by mesh.tp = {mesh.size()} processes: "
            "pad it to a multiple."
        )
    picked, mine = _rows_of(_by_stretch(tokens, mesh.size()).flatten(), rows, mesh.get_local_rank())
    found = F.embedding(picked, rows).masked_fill(~mine[:, None], 0.0)  # [tp * batch * seq / tp, dim]
    stretch = DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)])
    return stretch.to_local().unflatten(0, (tokens.shape[0], -1))


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """All logits [batch, seq, vocab], for sampling, from this process's stretch of `hidden` [batch, seq / tp, dim]."""
    mesh, _ = _cut(weight)
    stretch = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
    some = F.linear(stretch.redistribute(placements=[Replicate()]), weight)  # in parts along the vocabulary
    assert isinstance(some, DTensor)
    return some.full_tensor()


def summed_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """What `shoal.model.head.summed_cross_entropy` gives, the same number on every process of the axis.

    `hidden` [batch, seq / tp, dim] is this process's stretch, `targets` [batch, seq] are whole, and `weight` is a
    DTensor [vocab, dim] cut into rows.
    """
    mesh, rows = _cut(weight)
    hidden, rows = (as_computed(t) for t in recorded(hidden.flatten(0, 1), rows))
    targets = _by_stretch(targets, mesh.size())
    chunk = max(1, chunk_tokens(rows) // (2 * mesh.size()))  # of each process's tokens; two chunks are under way
    with torch.autocast(hidden.device.type, enabled=False):
        return _SummedCrossEntropy.apply(hidden, rows, targets, mesh.get_group(), chunk, z_loss)


def _cut(weight: Tensor) -> tuple[DeviceMesh, Tensor]:
    """The axis that a matrix is cut over, and this process's rows. Under FSDP too: its own cut is undone by now."""
    assert isinstance(weight, DTensor)
    return weight.device_mesh, weight.to_local()


def _by_stretch(tokens: Tensor, processes: int) -> Tensor:
    """[batch, seq] in the order in which gathered stretches lie: [tp, batch * seq / tp]."""
    return tokens.unflatten(1, (processes, -1)).transpose(0, 1).flatten(1)


def _rows_of(tokens: Tensor, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Which of this process's rows a token is, 0 where it is none, and whether it is one."""
    here = tokens - rank * weight.shape[0]
    mine = (here >= 0) & (here < weight.shape[0])
    return here.where(mine, 0), mine


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup, chunk: int, z_loss: float
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden: list[Tensor] = []  # [chunk, dim] each: this process's tokens, summed over all rows
        grad_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in _parts(hidden, weight, targets, group, chunk):
            scale, loss = _agree(part, group.size(), z_loss)
            total += loss
            if not (wants_hidden or wants_weight):
                continue
            # d loss / d logits = softmax - one_hot; rows without a target are zeroed where they are narrow (dim).
            slope = part.share.mul_(scale).scatter_add_(1, part.picked, -part.mine.float()).to(weight.dtype)
            if wants_hidden:
                grad_hidden.append(_reduce_scatter((slope @ weight).mul_(part.counts), "sum", 0, group))
            if wants_weight:
                grad_weight = add_product(grad_weight, slope.t(), part.hidden * part.counts)
        ctx.grads = torch.cat(grad_hidden) if wants_hidden else None, grad_weight
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        # The loss is one number that every process holds, not a sum over them: `grad` is the whole gradient of it.
        return *scaled_grads(ctx, grad), None, None, None, None


class _Part(NamedTuple):
    """A chunk of tokens as this process's rows of the vocabulary see it. n = tokens of all processes."""

    hidden: Tensor  # [n, dim]
    counts: Tensor  # [n, 1]: has a target
    mine: Tensor  # [n, 1]: its target is one of these rows
    picked: Tensor  # [n, 1]: which, 0 where none is
    share: Tensor  # [n, rows] float32: softmax over these rows alone
    peak: Tensor  # [n, 1] float32: the largest logit of these rows
    mass: Tensor  # [n, 1] float32: the sum of exp(logit - peak) over these rows
    told: Tensor  # [tp * n, 3] float32: peak, mass and target's logit of every process; may still be on its way


def _parts(hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup, chunk: int) -> Iterator[_Part]:
    """The chunks in order, each given once the next one's logits are computed and the one's after that sent for."""
    before: _Part | None = None
    coming = _all_gather(hidden[:chunk], 0, group)
    for start in range(0, hidden.shape[0], chunk):
        end = start + chunk
        whole = collectives.wait_tensor(coming)
        if end < hidden.shape[0]:
            coming = _all_gather(hidden[end : end + chunk], 0, group)
        part = _part(whole, weight, targets[:, start:end].flatten(), group)
        if before is not None:
            yield before
        before = part
    if before is not None:
        yield before


def _part(hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup) -> _Part:
    logits = hidden @ weight.t()  # [n, rows]
    picked, mine = _rows_of(targets[:, None], weight, group.rank())
    peak, top = logits.max(dim=-1, keepdim=True)
    share = F.softmax(logits, dim=-1, dtype=torch.float32)  # one pass; the largest is 1 / the sum of exponentials
    mass = share.gather(1, top).reciprocal_()
    target = logits.gather(1, picked).where(mine, 0.0)
    told = _all_gather(torch.cat((peak.float(), mass, target.float()), dim=1), 0, group)
    return _Part(hidden, targets[:, None] != NO_TARGET, mine, picked, share, peak.float(), mass, told)


def _agree(part: _Part, processes: int, z_loss: float) -> tuple[Tensor, Tensor]:
    """What turns this process's `share` into the softmax over all rows [n, 1] (with a z-loss as much larger as its
    gradient says), and the summed loss of the chunk."""
    peaks, masses, targets = part.told.unflatten(0, (processes, -1)).unbind(-1)  # [tp, n]
    peak = peaks.amax(dim=0)
    mass = (masses * (peaks - peak).exp()).sum(dim=0)
    loss = ((mass.log() + (peak - targets.sum(dim=0))) * part.counts[:, 0]).sum()
    scale = part.mass * (part.peak - peak[:, None]).exp() / mass[:, None]
    return scale * (1 + 2 * z_loss * (peak + mass.log())[:, None]) if z_loss else scale, loss
