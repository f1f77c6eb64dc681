"""Attention over some of the keys: the piece a ring is made of, how two pieces become one, and its gradient.

Softmax over all keys is a weighted mean of softmaxes over parts of them, the weights being the parts' sums of
exponentials. So a part hands over its result and the logarithm of that sum (`lse`), and `merge` needs nothing else
(arXiv:2112.05682). The other way round, the gradient through a part needs only the final result and the final `lse`.

Pure functions of tensors [batch, seq, heads, head_dim] on one device, with torch's own kernels:

    CPU                     flash_attention_for_cpu     any mask, shares key and value heads
    CUDA, bf16, no bias     flash_attention             shares key and value heads
    CUDA, otherwise         efficient_attention         any bias; key and value heads are copied, their gradients summed
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# What hides a key. Finite: a query that sees no key of a part then has a harmless `lse` of about this, which the merge
# gives the weight 0. With -inf the CPU's kernel and CUDA's efficient one write 0 there, as if it had seen something.
HIDDEN = -1e30

aten = torch.ops.aten
_LSE_ALIGN = 32  # the efficient kernels round their `lse` up to this many queries
_FLASH_MAX_HEAD_DIM = 256
_HEAD_DIM_ALIGN = 8  # CUDA kernels load 16 bytes at once


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q to these keys alone: the result [batch, queries, heads, head_dim] and its lse, float32
    [batch, heads, queries].

    `causal` is for parts that start at the same position. `bias` [batch or 1, 1, queries, keys] is added to the
    scores, in q's type: 0, or HIDDEN.
    """
    scale, head_dim = q.shape[-1] ** -0.5, q.shape[-1]
    if not q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, causal, attn_mask=bias, scale=scale
        )
        return out.transpose(1, 2), lse
    groups = q.shape[2] // k.shape[2]
    q, k, v = _align(q), _align(k), _align(v)
    if _takes_flash(q, bias):
        out, lse = aten._scaled_dot_product_flash_attention(*_heads_first(q, k, v), 0.0, causal, scale=scale)[:2]
    else:
        k, v = _spread(k, groups), _spread(v, groups)
        out, lse = aten._scaled_dot_product_efficient_attention(
            *_heads_first(q, k, v), _for_each_head(bias, q), True, 0.0, causal, scale=scale
        )[:2]
        lse = lse[..., : q.shape[1]]
    return out.transpose(1, 2)[..., :head_dim], lse


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Take another part in, in place. `out` and `lse` are float32 and begin as 0 and -inf."""
    weight = torch.sigmoid(part_lse - lse)  # exp(part_lse) / (exp(part_lse) + exp(lse)), without overflow
    out.lerp_(part_out.float(), weight.transpose(1, 2)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def partial_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients of q, k and v; `out` and `lse` are those over all keys."""
    scale, head_dim = q.shape[-1] ** -0.5, q.shape[-1]
    if not q.is_cuda:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(grad, q, k, v, out), lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        dq, dk, dv = (g.transpose(1, 2) for g in grads)
        return dq, dk, dv
    groups = q.shape[2] // k.shape[2]
    grad, q, k, v, out = (_align(t) for t in (grad, q, k, v, out))
    no_dropout = torch.empty(0, device=q.device)  # the random state, which is read only with dropout
    if _takes_flash(q, bias):
        grads = aten._scaled_dot_product_flash_attention_backward(
            *_heads_first(grad, q, k, v, out),
            lse.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            no_dropout,
            no_dropout,
            scale=scale,
        )
        dq, dk, dv = (g.transpose(1, 2)[..., :head_dim] for g in grads)
        return dq, dk, dv
    # The kernel reads `out` as if its rows lay one after the other, and lse past the end, where inf means nothing.
    grads = aten._scaled_dot_product_efficient_attention_backward(
        *_heads_first(grad, q, _spread(k, groups), _spread(v, groups)),
        _for_each_head(bias, q),
        out.contiguous().transpose(1, 2),
        F.pad(lse, (0, -lse.shape[-1] % _LSE_ALIGN), value=float("inf")).contiguous(),
        no_dropout,
        no_dropout,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    dq, dk, dv = (g.transpose(1, 2)[..., :head_dim] for g in grads[:3])
    return dq, _gather(dk, groups), _gather(dv, groups)


def _takes_flash(q: Tensor, bias: Tensor | None) -> bool:
    return bias is None and q.dtype == torch.bfloat16 and q.shape[-1] <= _FLASH_MAX_HEAD_DIM


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


def _align(t: Tensor) -> Tensor:
    """Zeros at the end of a head change neither scores nor results; the scale is that of the true head_dim."""
    return F.pad(t, (0, -t.shape[-1] % _HEAD_DIM_ALIGN)) if t.shape[-1] % _HEAD_DIM_ALIGN else t


def _spread(t: Tensor, groups: int) -> Tensor:
    return t.repeat_interleave(groups, dim=2) if groups > 1 else t


def _gather(t: Tensor, groups: int) -> Tensor:
    return t.unflatten(2, (-1, groups)).sum(3) if groups > 1 else t


def _for_each_head(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """[batch, heads, queries, keys] without a copy but one: rows must begin at multiples of 16 bytes."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    if keys % _HEAD_DIM_ALIGN:
        bias = F.pad(bias, (0, -keys % _HEAD_DIM_ALIGN))[..., :keys]
    return bias.expand(q.shape[0], q.shape[2], -1, -1)
