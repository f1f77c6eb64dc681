"""Attention of many new tokens over blocks of keys and values, or over rows of packed documents.

One routine for both, and for a single token: keys are taken in tiles of a fixed size, counted from the beginning of
their text, one after the other. So what a token gets does not depend on how many are computed beside it, nor on where
its text lies: a tile that a token does not see changes nothing of it. That is what `exact` rests on.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.paged_decode import Pages

QUERIES = 64  # rows of a tile: query heads that share keys, of as many tokens as fit
TILE = 64  # keys at a time


def attend_pages(
    q: Tensor,
    pages: Pages,
    tables: Tensor,
    begins: Tensor,
    positions: Tensor,
    longest: int,
    score_scale: float = 1.0,
    window: int | None = None,
) -> Tensor:
    """q [tokens, heads, head_dim] of several texts, one after the other: those of text i are from begins[i] to
    begins[i + 1] (int32 [texts + 1]), and the first of them stands at positions[i] of it; their keys and values are in
    the blocks already. `longest`: new tokens of a text at most. To [tokens, heads, head_dim]."""
    return _attend(q, pages.keys, pages.values, tables, begins, positions, longest, score_scale, window, pages)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    longest: int,
    score_scale: float = 1.0,
    window: int | None = None,
) -> Tensor:
    """The same where all of every text is here: q [tokens, heads, head_dim], k and v [tokens, key heads, head_dim]."""
    return _attend(q, k.contiguous(), v.contiguous(), begins, begins, begins, longest, score_scale, window, None)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    begins: Tensor,
    positions: Tensor,
    longest: int,
    score_scale: float,
    window: int | None,
    pages: Pages | None,
) -> Tensor:
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    assert q.stride()[1:] == (head_dim, 1)
    y = torch.empty(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    wide = triton.next_power_of_2(head_dim)
    with torch.cuda.device_of(q):
        _attend_many[(triton.cdiv(longest * groups, QUERIES), begins.shape[0] - 1, kv_heads)](
            q,
            k,
            v,
            y,
            tables,
            begins,
            positions,
            q.stride(0),
            tables.stride(0),
            score_scale / math.sqrt(head_dim) * math.log2(math.e),
            KV_HEADS=kv_heads,
            GROUPS=groups,
            DIM=head_dim,
            WINDOW=window or 0,
            PAGE=pages.size if pages is not None else 0,
            QUERIES=QUERIES,
            TILE=TILE,
            PADDED_DIM=max(16, wide),
            num_warps=4 if wide <= 128 else 8,
            num_stages=2 if q.dtype != torch.float32 and wide <= 128 else 1,
        )
    return y


@triton.jit
def _attend_many(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    y,
    tables,
    begins,
    positions,
    q_apart,
    table_apart,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    text = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(begins + text)
    count = tl.load(begins + text + 1) - begin
    first = tl.program_id(0) * QUERIES
    if first >= count * GROUPS:
        return
    before = 0  # tokens of the text that are not new
    if PAGE:
        before = tl.load(positions + text)
        if before < 0:
            return
    line = first + tl.arange(0, QUERIES)
    token = line // GROUPS
    there = token < count
    at = before + token  # in its text
    d = tl.arange(0, PADDED_DIM)
    in_head = d < DIM
    dtype = keys.dtype.element_ty
    heads = head * GROUPS + line % GROUPS
    from_q = q + (begin + token).to(tl.int64)[:, None] * q_apart + heads[:, None] * DIM + d[None, :]
    qs = tl.load(from_q, mask=there[:, None] & in_head[None, :], other=0.0).to(dtype)
    last = tl.minimum((first + QUERIES - 1) // GROUPS, count - 1) + before
    start = 0
    if WINDOW:
        start = tl.maximum(before + first // GROUPS - WINDOW + 1, 0) // TILE * TILE
    largest = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, PADDED_DIM), tl.float32)
    for some in range(start, last + 1, TILE):
        n = some + tl.arange(0, TILE)
        known = n <= last
        if PAGE:
            page = tl.load(tables + text * table_apart + n // PAGE, mask=known, other=0).to(tl.int64)
            place = ((page * KV_HEADS + head) * PAGE + n % PAGE) * DIM
        else:
            place = ((begin + n).to(tl.int64) * KV_HEADS + head) * DIM
        ks = tl.load(keys + place[None, :] + d[:, None], mask=in_head[:, None] & known[None, :], other=0.0)
        scores = tl.dot(qs, ks, input_precision="ieee") * scale
        back = at[:, None] - n[None, :]
        seen = back >= 0
        if WINDOW:
            seen = seen & (back < WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        level = tl.where(larger == -float("inf"), 0.0, larger)  # who has seen nothing yet
        shares = tl.exp2(scores - level[:, None])
        fade = tl.exp2(largest - level)
        total = total * fade + tl.sum(shares, axis=1)
        vs = tl.load(values + place[:, None] + d[None, :], mask=known[:, None] & in_head[None, :], other=0.0)
        mixed = tl.dot(shares.to(dtype), vs, mixed * fade[:, None], input_precision="ieee")
        largest = larger
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    to = y + ((begin + token).to(tl.int64)[:, None] * (KV_HEADS * GROUPS) + heads[:, None]) * DIM + d[None, :]
    tl.store(to, mixed.to(y.dtype.element_ty), mask=there[:, None] & in_head[None, :])
