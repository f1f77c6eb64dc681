"""Attention among packed documents on a GPU: FlexAttention, which skips the blocks that no document reaches across.

A mask of ones and zeros over all pairs makes every kernel read and compute the whole square (measured on an H200 at
4,096 tokens: 15 ms a block against 2.8). Here the mask is a rule, and which blocks of 128 x 128 it leaves empty is told
from the first and last document of each stretch, since documents are numbered in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shoal.model.attention import attend as attend_plainly
from shoal.model.attention import attention_mask
from shoal.model.decoder import Decoder
from shoal.model.mixers import attentions
from shoal.same_bits import same_bits

BLOCK = 128


def apply(decoder: Decoder) -> None:
    """The decoder's seams on CUDA, where no context parallelism has taken them. What flex has no kernel for stays."""
    width = decoder.shape.head_dim
    if width < 16 or width & (width - 1):
        return
    decoder.mask = mask
    for attention in attentions(decoder):
        attention.attend = attend


def mask(documents: Tensor | None, seq: int, window: int | None, device: torch.device) -> BlockMask | Tensor | None:
    """As `attention_mask`, with a rule in the place of a matrix."""
    if window is not None and window >= seq:
        window = None
    if documents is None:
        return attention_mask(None, seq, window, device)
    blocks = -(-seq // BLOCK)
    padded = torch.nn.functional.pad(documents, (0, blocks * BLOCK - seq), mode="replicate")
    stretches = padded.unflatten(1, (blocks, BLOCK))
    first, last = stretches[..., 0], stretches[..., -1]  # [batch, blocks]
    at = torch.arange(blocks, device=device)
    back = at[:, None] - at[None, :]  # blocks of queries down, of keys across
    some = (back >= 0) & (last[:, None, :] >= first[:, :, None])
    all_of = (back > 0) & (first[:, None, :] == last[:, :, None])
    if window is not None:
        some &= (back - 1) * BLOCK + 1 < window
        all_of &= (back + 1) * BLOCK - 1 < window
    rule = _rule(documents, window)
    return BlockMask.from_kv_blocks(*_listed(some & ~all_of), *_listed(all_of), BLOCK, rule, seq_lengths=(seq, seq))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor | None, groups: int) -> Tensor:
    if not isinstance(mask, BlockMask):
        return attend_plainly(q, k, v, mask, groups)
    flex = _compiled() if not torch.compiler.is_compiling() else cast(Callable[..., Any], flex_attention)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return flex(q, k, v, block_mask=mask, enable_gqa=groups > 1).transpose(1, 2)


def _rule(documents: Tensor, window: int | None) -> Callable[..., Tensor]:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (query >= key) & (documents[batch, query] == documents[batch, key])
        return same if window is None else same & (query - key < window)

    return sees


def _listed(which: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of blocks, how many are in `which` and their numbers, those first; as flex wants them."""
    counts = which.sum(-1, dtype=torch.int32)[:, None]
    numbers = torch.argsort(which.int(), dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
    return counts, numbers.contiguous()


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, options=same_bits())
