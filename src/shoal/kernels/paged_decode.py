"""Attention of one new token for each sequence over its blocks of keys and values.

What comes before it is computed within: the norms of queries and keys, their rotary turn, and the new key and value go
into their block. Query heads that share keys are the rows of one tile, so that keys are read once. A long sequence is
split over programs, and the one that ends last puts their parts together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # keys at a time
LEAST = 2  # tiles for which a program of its own pays


@dataclass(frozen=True)
class Pages:
    """Keys and values of one layer, each [blocks, key heads, tokens of a block, head_dim]."""

    keys: Tensor
    values: Tensor

    @property
    def size(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True)
class Turn:
    """What queries and keys go through: cosines and sines [positions, rotary_dim / 2], and norms over a head."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    centred: bool = False


@dataclass(frozen=True)
class Room:
    """Where programs leave their parts; kept by who calls, since a graph has its addresses. `counters` are zero, and
    zero again afterwards."""

    parts: Tensor  # float32 [rows, key heads, splits, groups, head_dim + 2]
    counters: Tensor  # int32 [rows, key heads]

    @property
    def splits(self) -> int:
        return self.parts.shape[2]


def room(rows: int, kv_heads: int, groups: int, head_dim: int, device: torch.device, programs: int = 264) -> Room:
    """For a batch. `programs`: so many keep the device busy."""
    splits = max(1, min(64, programs // (rows * kv_heads)))
    parts = torch.empty(rows, kv_heads, splits, groups, head_dim + 2, dtype=torch.float32, device=device)
    return Room(parts, torch.zeros(rows, kv_heads, dtype=torch.int32, device=device))


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    tables: Tensor,
    positions: Tensor,
    room: Room,
    score_scale: float = 1.0,
    window: int | None = None,
    turn: Turn | None = None,
) -> Tensor:
    """q [rows, heads, head_dim], k and v [rows, key heads, head_dim], of which rows may lie apart; tables [rows, most
    blocks] int32; positions [rows] int32 of the new tokens, negative where there is none. To [rows, heads, head_dim].
    Keys and values of the new tokens are in their blocks afterwards."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert room.parts.shape == (rows, kv_heads, room.splits, groups, head_dim + 2)
    y = torch.empty(rows, heads, head_dim, dtype=q.dtype, device=q.device)
    normed = turn is not None and turn.q_norm is not None
    with torch.cuda.device_of(q):
        _attend_one[(rows * kv_heads, room.splits)](
            q,
            k,
            v,
            y,
            pages.keys,
            pages.values,
            tables,
            positions,
            turn.cos if turn is not None else q,
            turn.sin if turn is not None else q,
            turn.q_norm if turn is not None and turn.q_norm is not None else q,
            turn.k_norm if turn is not None and turn.k_norm is not None else q,
            room.parts,
            room.counters,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            tables.stride(0),
            score_scale / math.sqrt(head_dim) * math.log2(math.e),
            turn.eps if turn is not None else 0.0,
            KV_HEADS=kv_heads,
            GROUPS=groups,
            DIM=head_dim,
            HALF=turn.cos.shape[1] if turn is not None else 0,
            WINDOW=window or 0,
            NORM=(1 + turn.centred) if normed and turn is not None else 0,
            PAGE=pages.size,
            SPLITS=room.splits,
            LEAST=LEAST,
            TILE=TILE,
            PADDED_GROUPS=max(16, triton.next_power_of_2(groups)),
            PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
            num_warps=4,
            num_stages=3,
        )
    return y


@triton.jit
def _turned(
    x,
    apart,
    norm,
    cos,
    sin,
    at,
    g,
    d,
    eps,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Heads at x, `apart` from each other, in float32: normed, and their first 2 * HALF numbers turned."""
    there = (g < GROUPS)[:, None] & (d < DIM)[None, :]
    place = x + g[:, None] * apart
    y = tl.load(place + d[None, :], mask=there, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(y * y, axis=1) / DIM + eps)[:, None]
        n = tl.load(norm + d, mask=d < DIM, other=0.0).to(tl.float32)
        if NORM == 2:
            n += 1.0
        y = y * scale * n[None, :]
    if HALF:
        partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
        z = tl.load(place + partner[None, :], mask=there, other=0.0).to(tl.float32)
        if NORM:
            n = tl.load(norm + partner, mask=d < DIM, other=0.0).to(tl.float32)
            if NORM == 2:
                n += 1.0
            z = z * scale * n[None, :]
        angle = tl.where(d < HALF, d, d - HALF)
        turns = d < 2 * HALF
        c = tl.load(cos + at * HALF + angle, mask=turns, other=1.0)
        s = tl.load(sin + at * HALF + angle, mask=turns, other=0.0) * tl.where(d < HALF, -1.0, 1.0)
        y = y * c[None, :] + z * s[None, :]
    return y


@triton.jit
def _attend_one(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    y,
    keys,
    values,
    tables,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    parts,
    counters,
    q_apart,
    k_apart,
    v_apart,
    table_apart,
    scale,
    eps,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    row = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    at = tl.load(positions + row)
    if at < 0:
        return
    first = 0
    if WINDOW:
        first = tl.maximum(at - WINDOW + 1, 0)
    tiles = tl.cdiv(at - first, TILE)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), LEAST)
    active = tl.maximum(tl.cdiv(tiles, each), 1)
    if split >= active:
        return
    begin = first + split * each * TILE
    end = tl.minimum(begin + each * TILE, at)

    g = tl.arange(0, PADDED_GROUPS)
    d = tl.arange(0, PADDED_DIM)
    in_head = d < DIM
    dtype = keys.dtype.element_ty
    q_heads = q + row.to(tl.int64) * q_apart + head * GROUPS * DIM
    qs = _turned(q_heads, DIM, q_norm, cos, sin, at, g, d, eps, GROUPS, DIM, HALF, NORM)
    qs = (qs * scale).to(dtype)
    largest = tl.full((PADDED_GROUPS,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED_GROUPS,), tl.float32)
    mixed = tl.zeros((PADDED_GROUPS, PADDED_DIM), tl.float32)
    if split == 0:  # the new token is no part of what is read: it is still here
        new_k = k + row.to(tl.int64) * k_apart + head * DIM
        ks = _turned(new_k, 0, k_norm, cos, sin, at, g, d, eps, GROUPS, DIM, HALF, NORM).to(dtype)
        vs = tl.load(v + row.to(tl.int64) * v_apart + head * DIM + d, mask=in_head, other=0.0).to(dtype)
        page = tl.load(tables + row * table_apart + at // PAGE).to(tl.int64)
        place = ((page * KV_HEADS + head) * PAGE + at % PAGE) * DIM + d
        one = tl.sum(tl.where((g == 0)[:, None], ks.to(tl.float32), 0.0), axis=0)
        tl.store(keys + place, one.to(dtype), mask=in_head)
        tl.store(values + place, vs, mask=in_head)
        largest = tl.sum(qs.to(tl.float32) * ks.to(tl.float32), axis=1)
        total += 1.0
        mixed += vs.to(tl.float32)[None, :]
    for start in range(begin, end, TILE):
        n = start + tl.arange(0, TILE)
        seen = n < end
        page = tl.load(tables + row * table_apart + n // PAGE, mask=seen, other=0).to(tl.int64)
        place = ((page * KV_HEADS + head) * PAGE + n % PAGE) * DIM
        ks = tl.load(keys + place[None, :] + d[:, None], mask=in_head[:, None] & seen[None, :], other=0.0)
        vs = tl.load(values + place[:, None] + d[None, :], mask=seen[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(qs, ks, input_precision="ieee")
        scores = tl.where(seen[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        shares = tl.exp2(scores - larger[:, None])
        fade = tl.exp2(largest - larger)
        total = total * fade + tl.sum(shares, axis=1)
        mixed = tl.dot(shares.to(dtype), vs, mixed * fade[:, None], input_precision="ieee")
        largest = larger

    out = y + (row.to(tl.int64) * KV_HEADS + head) * GROUPS * DIM + g[:, None] * DIM + d[None, :]
    there = (g < GROUPS)[:, None] & in_head[None, :]
    if active == 1:
        tl.store(out, (mixed / total[:, None]).to(y.dtype.element_ty), mask=there)
    else:
        wide: tl.constexpr = DIM + 2
        mine = parts + ((row * KV_HEADS + head) * SPLITS + split).to(tl.int64) * GROUPS * wide + g * wide
        tl.store(mine[:, None] + d[None, :], mixed, mask=there)
        tl.store(mine + DIM, largest, mask=g < GROUPS)
        tl.store(mine + DIM + 1, total, mask=g < GROUPS)
        tl.debug_barrier()  # all of it is written before it is counted
        ended = tl.atomic_add(counters + row * KV_HEADS + head, 1, sem="acq_rel")
        if ended == active - 1:
            tl.store(counters + row * KV_HEADS + head, 0)
            largest = tl.full((PADDED_GROUPS,), -float("inf"), tl.float32)
            total = tl.zeros((PADDED_GROUPS,), tl.float32)
            mixed = tl.zeros((PADDED_GROUPS, PADDED_DIM), tl.float32)
            for part in range(active):
                theirs = parts + ((row * KV_HEADS + head) * SPLITS + part).to(tl.int64) * GROUPS * wide + g * wide
                m = tl.load(theirs + DIM, mask=g < GROUPS, other=0.0, cache_modifier=".cg")
                t = tl.load(theirs + DIM + 1, mask=g < GROUPS, other=1.0, cache_modifier=".cg")
                x = tl.load(theirs[:, None] + d[None, :], mask=there, other=0.0, cache_modifier=".cg")
                larger = tl.maximum(largest, m)
                old = tl.exp2(largest - larger)
                new = tl.exp2(m - larger)
                total = total * old + t * new
                mixed = mixed * old[:, None] + x * new[:, None]
                largest = larger
            tl.store(out, (mixed / total[:, None]).to(y.dtype.element_ty), mask=there)
