"""Ring attention (arXiv:2310.01889): keys and values go around, queries stay, nobody holds the whole sequence.

Each process computes its queries' attention to the block it has while the next block is on its way, and merges the
results. In the backward pass keys and values go around once more, and each block's gradient follows it, one process
behind, and ends at home. `shoal.parallel.pairs` says what is computed at each step; every process passes every block
on, whether it had a use for it or not.

A ring of n processes makes n - 1 exchanges of keys and values in the forward pass, n - 1 more and n - 1 of gradients,
in float32, in the backward pass. It is one operator to torch: selective recomputation may keep its result, and a
compiled block calls it without a break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from shoal.parallel import pairs
from shoal.parallel.pairs import Piece
from shoal.parallel.partial import merge_, partial_attention, partial_backward

KEYS, GRADIENTS = 0, 1  # tags: both kinds of message are under way at once


def attend(q: Tensor, k: Tensor, v: Tensor, mask: pairs.Plan, groups: int, *, group: str) -> Tensor:
    """Takes the place of the model's `attend`: its tokens [batch, seq, heads, head_dim] attend to the whole row."""
    device = q.device.type
    if torch.is_autocast_enabled(device):  # as it does for torch's own attention
        q, k, v = (t.to(torch.get_autocast_dtype(device)) for t in (q, k, v))
    out, _ = ring_attention(q, k, v, mask.pieces, mask.documents, group)
    return out


@torch.library.custom_op("shoal::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, documents: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    """The result [batch, seq, heads, head_dim] and its log-sum-exp [batch, heads, seq], float32."""
    ring = _resolve_process_group(group)  # type: ignore[arg-type]  # GroupName is a str
    last = ring.size() - 1
    out, lse = nothing_yet(q)
    block = torch.stack((k, v))  # [2, batch, seq, kv_heads, head_dim]: one message
    for step, todo in enumerate(pairs.by_step(pieces, ring.size())):
        arrive = pass_on(block, ring, KEYS) if step < last else None
        attend_to_(block, todo, documents, q, out, lse)
        if arrive is not None:
            block = arrive()
    return out.to(q.dtype), lse


@torch.library.custom_op("shoal::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Tensor,
    documents: Tensor | None,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ring = _resolve_process_group(group)  # type: ignore[arg-type]  # GroupName is a str
    last = ring.size() - 1
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    block = torch.stack((k, v))
    # What the own queries give the own block stays here: the gradient that travels starts with the next process, which
    # saves an exchange.
    own: Tensor | None = None
    home: Callable[[], Tensor] | None = None
    for step, todo in enumerate(pairs.by_step(pieces, ring.size())):
        arrive = pass_on(block, ring, KEYS) if step < last else None
        grads = gradients_to_(block, todo, documents, grad, q, out, lse, dq)
        if own is None:
            own = grads
        else:
            if home is not None:
                grads += home()
            home = pass_on(grads, ring, GRADIENTS)
        if arrive is not None:
            block = arrive()
    assert own is not None
    if home is not None:
        own += home()
    dk, dv = (g.to(k.dtype, copy=True) for g in own)  # an operator's results may not share memory
    return dq.to(q.dtype), dk, dv


def nothing_yet(q: Tensor) -> tuple[Tensor, Tensor]:
    """The result and log-sum-exp of q before it has seen any key."""
    batch, seq, heads, _ = q.shape
    lse = torch.full((batch, heads, seq), float("-inf"), dtype=torch.float32, device=q.device)
    return torch.zeros(q.shape, dtype=torch.float32, device=q.device), lse


def attend_to_(block: Tensor, todo: list[Piece], documents: Tensor | None, q: Tensor, out: Tensor, lse: Tensor) -> None:
    """Take one block of keys and values into the result, in place."""
    for piece in todo:
        mine, theirs = slice(piece.q, piece.q_end), slice(piece.k, piece.k_end)
        k, v = block[:, :, theirs]
        part = partial_attention(q[:, mine], k, v, piece.kind == pairs.CAUSAL, pairs.bias(piece, documents, q))
        merge_(out[:, mine], lse[:, :, mine], *part)


def gradients_to_(
    block: Tensor,
    todo: list[Piece],
    documents: Tensor | None,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
) -> Tensor:
    """What these queries give a block of keys and values, in float32; what it gives them is added to dq in place."""
    grads = torch.zeros(block.shape, dtype=torch.float32, device=block.device)
    for piece in todo:
        mine, theirs = slice(piece.q, piece.q_end), slice(piece.k, piece.k_end)
        k, v = block[:, :, theirs]
        of_q, of_k, of_v = partial_backward(
            grad[:, mine],
            q[:, mine],
            k,
            v,
            out[:, mine],
            lse[:, :, mine],
            piece.kind == pairs.CAUSAL,
            pairs.bias(piece, documents, q),
        )
        dq[:, mine] += of_q
        grads[0, :, theirs] += of_k
        grads[1, :, theirs] += of_v
    return grads


def pass_on(block: Tensor, ring: dist.ProcessGroup, tag: int) -> Callable[[], Tensor]:
    """Start sending a block to the next process; what is returned waits for the one from the process before.

    On a GPU only its queue waits, not the host.
    """
    arriving = torch.empty_like(block)
    rank, size = ring.rank(), ring.size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block, group=ring, tag=tag, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, arriving, group=ring, tag=tag, group_peer=(rank - 1) % size),
        ]
    )

    def arrive(sent: Tensor = block) -> Tensor:  # holds on to what is being sent
        for work in works:
            work.wait()
        return arriving

    return arrive


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, documents: Tensor | None, group: str) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seq), dtype=torch.float32)


@ring_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Tensor,
    documents: Tensor | None,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, pieces, documents, out, lse = ctx.saved_tensors
    grads = ring_attention_backward(grad, q, k, v, out, lse, pieces, documents, ctx.group)
    return (*grads, None, None, None)


ring_attention.register_autograd(_backward, setup_context=_keep)
