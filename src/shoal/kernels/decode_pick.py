"""What stands before and after a decode step on a GPU: the hidden states of the last tokens, and the next tokens.

Picking is what `shoal.generate.pick` does with the same logits and the same uniform number: the likeliest token, or the
one at that place of all shares in the order of the vocabulary, after top_k, top_p and min_p. Nothing is sorted: the
lowest logit that may be drawn is found by halving, over the ordered bits of the logits, and only for rows that ask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNKS = 32  # of the vocabulary, scanned beside each other
BLOCK = 2048
POSITION, TOKEN, SEAT, WHERE, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(8)
COLUMNS = 8
"""Of what the host asks of a row, float64. TOKEN: negative takes what the seat has picked last. POSITION: negative is
no row. TEMPERATURE 0: the likeliest. TOP_K 0: all."""


def begin(asked: Tensor, last: Tensor, embed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Hidden states [rows, dim] of the tokens that come in, and their positions [rows] int32."""
    rows, dim = asked.shape[0], embed.shape[1]
    x = torch.empty(rows, dim, dtype=embed.dtype, device=embed.device)
    positions = torch.empty(rows, dtype=torch.int32, device=embed.device)
    with torch.cuda.device_of(x):
        _begin[(rows, triton.cdiv(dim, 1024))](
            asked, last, embed, x, positions, dim, scale, COLUMNS=COLUMNS, BLOCK=1024
        )
    return x, positions


def pick(logits: Tensor, asked: Tensor, last: Tensor, vocabulary: int) -> Tensor:
    """Of logits [rows, vocab] a token for each row, of the first `vocabulary`: told as float64 [rows, 2], the token (-1
    where the logits are not finite) and its log-probability by the logits as they are. `last` gets it at the seat."""
    rows, wide = logits.shape
    assert logits.stride(1) == 1
    stats = torch.empty(rows, 5, CHUNKS, dtype=torch.float32, device=logits.device)
    told = torch.empty(rows, 2, dtype=torch.float64, device=logits.device)
    chunk = triton.cdiv(triton.cdiv(wide, CHUNKS), BLOCK) * BLOCK
    with torch.cuda.device_of(logits):
        sizes = logits.stride(0), wide, vocabulary, chunk
        _scan[(rows, CHUNKS)](logits, asked, stats, *sizes, COLUMNS=COLUMNS, CHUNKS=CHUNKS, BLOCK=BLOCK, num_warps=4)
        bits = 16 if logits.dtype == torch.bfloat16 else 32
        _choose[(rows,)](
            logits,
            asked,
            stats,
            last,
            told,
            *sizes,
            COLUMNS=COLUMNS,
            CHUNKS=CHUNKS,
            BLOCK=BLOCK,
            BITS=bits,
            num_warps=8,
        )
    return told


@triton.jit
def _begin(asked, last, embed, x, positions, dim, scale, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    mine = asked + row * COLUMNS
    token = tl.load(mine + 1).to(tl.int64)
    if token < 0:
        token = tl.load(last + tl.load(mine + 2).to(tl.int64)).to(tl.int64)
    token = tl.maximum(token, 0)  # where nothing could be picked
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(embed + token * dim + d, mask=d < dim, other=0.0)
    if scale != 1.0:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(x + row.to(tl.int64) * dim + d, value, mask=d < dim)
    if tl.program_id(1) == 0:
        tl.store(positions + row, tl.load(mine).to(tl.int32))


@triton.jit
def _scan(
    logits,
    asked,
    stats,
    apart,
    wide,
    vocabulary,
    chunk,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Of a chunk: the largest logit and the sum of exponentials below it, of all; and of those that may be drawn the
    largest, where it stands, and the sum with the temperature."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(asked + row * COLUMNS + 4).to(tl.float32)
    cold = tl.where(temperature > 0.0, 1.0 / tl.maximum(temperature, 1e-20), 1.0)
    largest, total = -float("inf"), 0.0
    best, drawn, place = -float("inf"), 0.0, tl.full((), 0, tl.int32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, wide), BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * apart + n, mask=n < wide, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        level = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - level) + tl.sum(tl.exp(x - level), axis=0)
        largest = larger
        x = tl.where(n < vocabulary, x, -float("inf"))
        top = tl.max(x, axis=0)
        if top > best:
            place = tl.min(tl.where(x == top, n, 2147483647), axis=0)
        better = tl.maximum(best, top)
        level = tl.where(better == -float("inf"), 0.0, better)
        drawn = drawn * tl.exp((best - level) * cold) + tl.sum(tl.exp((x - level) * cold), axis=0)
        best = better
    to = stats + row * 5 * CHUNKS + part
    tl.store(to, largest)
    tl.store(to + CHUNKS, total)
    tl.store(to + 2 * CHUNKS, best)
    tl.store(to + 3 * CHUNKS, place.to(tl.float32))
    tl.store(to + 4 * CHUNKS, drawn)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Whole numbers from 0 in the order of floats; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits,
    asked,
    stats,
    last,
    told,
    apart,
    wide,
    vocabulary,
    chunk,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mine = asked + row * COLUMNS
    if tl.load(mine) < 0:
        return
    c = tl.arange(0, CHUNKS)
    of = stats + row * 5 * CHUNKS + c
    largest, best = tl.load(of), tl.load(of + 2 * CHUNKS)
    top = tl.max(largest, axis=0)
    sums = tl.load(of + CHUNKS) * tl.exp(largest - top)
    log_total = top + tl.log(tl.sum(sums, axis=0))
    most = tl.max(best, axis=0)
    places = tl.load(of + 3 * CHUNKS).to(tl.int32)
    token = tl.min(tl.where(best == most, places, 2147483647), axis=0)
    temperature = tl.load(mine + 4).to(tl.float32)
    if temperature > 0.0:
        cold = 1.0 / temperature
        where = tl.load(mine + 3)
        top_k, top_p, min_p = tl.load(mine + 5).to(tl.int64), tl.load(mine + 6), tl.load(mine + 7)
        x_row = logits + row * apart
        lowest = tl.full((), 0, tl.int64)  # in the order of bits: what may be drawn
        ties = tl.full((), 2147483647, tl.int64)  # so many of the lowest, the first ones
        few = (top_k > 0) & (top_k < vocabulary)
        filtered = (top_p < 1.0) | (min_p > 0.0) | few
        if few:
            for bit in range(BITS):
                trial = lowest + (tl.full((), 1, tl.int64) << (31 - bit))
                count = tl.full((), 0, tl.int64)
                for start in range(0, vocabulary, BLOCK):
                    n = start + tl.arange(0, BLOCK)
                    x = tl.load(x_row + n, mask=n < vocabulary, other=0.0).to(tl.float32)
                    count += tl.sum(((_ordered(x) >= trial) & (n < vocabulary)).to(tl.int64), axis=0)
                lowest = tl.where(count >= top_k, trial, lowest)
        if top_p < 1.0:
            whole = tl.full((), 0.0, tl.float64)
            for start in range(0, vocabulary, BLOCK):
                n = start + tl.arange(0, BLOCK)
                x = tl.load(x_row + n, mask=n < vocabulary, other=-float("inf")).to(tl.float32)
                e = tl.exp((x - most) * cold)
                whole += tl.sum(tl.where(_ordered(x) >= lowest, e, 0.0).to(tl.float64), axis=0)
            wanted = top_p * whole
            found = tl.full((), 0, tl.int64)
            for bit in range(BITS):
                trial = found + (tl.full((), 1, tl.int64) << (31 - bit))
                above = tl.full((), 0.0, tl.float64)
                for start in range(0, vocabulary, BLOCK):
                    n = start + tl.arange(0, BLOCK)
                    x = tl.load(x_row + n, mask=n < vocabulary, other=-float("inf")).to(tl.float32)
                    e = tl.exp((x - most) * cold)
                    above += tl.sum(tl.where(_ordered(x) >= trial, e, 0.0).to(tl.float64), axis=0)
                found = tl.where(above >= wanted, trial, found)
            found = tl.minimum(tl.maximum(found, lowest), _ordered(most))
            above = tl.full((), 0.0, tl.float64)  # what is likelier than the lowest
            one = tl.full((), 0.0, tl.float64)  # and how likely that is itself
            for start in range(0, vocabulary, BLOCK):
                n = start + tl.arange(0, BLOCK)
                x = tl.load(x_row + n, mask=n < vocabulary, other=-float("inf")).to(tl.float32)
                e = tl.exp((x - most) * cold)
                key = _ordered(x)
                above += tl.sum(tl.where(key > found, e, 0.0).to(tl.float64), axis=0)
                one = tl.maximum(one, tl.max(tl.where(key == found, e, 0.0).to(tl.float64), axis=0))
            fit = tl.ceil((wanted - above) / tl.maximum(one, 1e-300))
            ties = tl.maximum(tl.minimum(fit, 2147483647.0), 1.0).to(tl.int64)
            lowest = found
        first, end = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + vocabulary
        before = tl.full((), 0.0, tl.float64)
        place = tl.full((), 0.0, tl.float64)
        if filtered:
            seen = tl.full((), 0, tl.int64)
            whole = tl.full((), 0.0, tl.float64)
            for start in range(0, vocabulary, BLOCK):
                n = start + tl.arange(0, BLOCK)
                x = tl.load(x_row + n, mask=n < vocabulary, other=-float("inf")).to(tl.float32)
                e = tl.exp((x - most) * cold)
                key = _ordered(x)
                tie = ((key == lowest) & (n < vocabulary)).to(tl.int64)
                allowed = (key > lowest) | ((tie > 0) & (seen + tl.cumsum(tie, axis=0) <= ties))
                allowed = allowed & (e.to(tl.float64) >= min_p)
                whole += tl.sum(tl.where(allowed, e, 0.0).to(tl.float64), axis=0)
                seen += tl.sum(tie, axis=0)
            place = where * whole
        else:
            shares = tl.load(of + 4 * CHUNKS).to(tl.float64) * tl.exp((best - most) * cold).to(tl.float64)
            sums_so_far = tl.cumsum(shares, axis=0)
            place = where * tl.sum(shares, axis=0)
            mine_is = tl.min(tl.where(sums_so_far > place, c, CHUNKS - 1), axis=0)
            before = tl.sum(tl.where(c < mine_is, shares, 0.0), axis=0)
            first = mine_is * chunk
            end = tl.minimum(first + chunk, vocabulary)
        seen = tl.full((), 0, tl.int64)
        start, drawn, fallback = first, tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
        while (start < end) & (drawn < 0):
            n = start + tl.arange(0, BLOCK)
            x = tl.load(x_row + n, mask=n < end, other=-float("inf")).to(tl.float32)
            e = tl.exp((x - most) * cold)
            key = _ordered(x)
            tie = ((key == lowest) & (n < end)).to(tl.int64)
            allowed = (key > lowest) | ((tie > 0) & (seen + tl.cumsum(tie, axis=0) <= ties))
            allowed = allowed & (e.to(tl.float64) >= min_p) & (n < end) & (e > 0.0)
            seen += tl.sum(tie, axis=0)
            part = tl.where(allowed, e, 0.0).to(tl.float64)
            passed = allowed & (before + tl.cumsum(part, axis=0) > place)
            hit = tl.min(tl.where(passed, n, 2147483647), axis=0)
            drawn = tl.where(hit < 2147483647, hit, -1)
            fallback = tl.maximum(fallback, tl.max(tl.where(allowed, n, -1), axis=0))
            before += tl.sum(part, axis=0)
            start += BLOCK
        drawn = tl.where(drawn >= 0, drawn, fallback)  # the last digits of a sum are not its own
        token = tl.where(drawn >= 0, drawn, token)
    finite = (log_total - log_total) == 0.0
    safe = tl.where(finite, token, 0)
    logprob = tl.load(logits + row * apart + safe).to(tl.float32) - log_total
    token = tl.where(finite, token, -1)
    tl.store(last + tl.load(mine + 2).to(tl.int64), token)
    tl.store(told + row * 2, token.to(tl.float64))
    tl.store(told + row * 2 + 1, logprob.to(tl.float64))
