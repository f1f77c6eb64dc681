"""Logits to their gradient: in place in one pass of memory in and one out, where log_softmax, exp and a cast take five;
or in 8 bits, as it is and transposed."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # of the vocabulary, at a time: the second reading of a row comes from the cache
TILE = 128
LOG2_E = tl.constexpr(math.log2(math.e))


def cross_entropy_(logits: Tensor, targets: Tensor, slopes: bool, z_loss: float = 0.0) -> Tensor:
    """The cross-entropy of each row of `logits` [tokens, vocab], float32 [tokens]; 0 where the target is negative.

    With `slopes` the logits become the gradient of the sum of these, and of `z_loss` times the squared logsumexps.
    """
    assert logits.stride(1) == 1
    return _rows(logits, targets, slopes, z_loss)[0]


def cross_entropy_8(
    logits: Tensor, targets: Tensor, scale: float, dtype: torch.dtype, transposed: Tensor
) -> tuple[Tensor, Tensor]:
    """The same losses, and their gradient times `scale` in an 8-bit type [tokens, vocab]; its transpose goes into
    `transposed` [vocab, tokens], whose rows may lie apart. Nothing beyond the type's range is clamped: a gradient is
    never above 1."""
    losses, totals = _rows(logits, targets, slopes=False)
    rows, vocab = logits.shape
    slopes = torch.empty(rows, vocab, dtype=dtype, device=logits.device)
    assert transposed.stride(1) == 1
    sizes = rows, vocab, logits.stride(0), transposed.stride(0)
    with torch.cuda.device_of(logits):
        grid = triton.cdiv(rows, TILE), triton.cdiv(vocab, TILE)
        _softmax_8[grid](logits, totals, slopes, transposed, *sizes, math.log2(scale), TILE=TILE, num_warps=4)
        _one_hot_8[(triton.cdiv(rows, TILE),)](
            logits, targets, totals, slopes, transposed, *sizes, scale, BLOCK=TILE, num_warps=2
        )
    return losses, slopes


def _rows(logits: Tensor, targets: Tensor, slopes: bool, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Losses and, of each row, the logarithm of its sum of exponentials; infinite where the target is negative."""
    losses, totals = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    with torch.cuda.device_of(logits):
        _cross_entropy[(logits.shape[0],)](
            logits,
            targets,
            losses,
            totals,
            logits.shape[1],
            logits.stride(0),
            2.0 * z_loss,
            SLOPES=slopes,
            SQUARES=z_loss > 0,
            BLOCK=block,
            num_warps=16,
        )
    return losses, totals


@triton.jit(do_not_specialize=["twice_z"])
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    totals,
    vocab,
    stride,
    twice_z,
    SLOPES: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counts = target >= 0
    largest = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    log_total = largest + tl.log(total)
    picked = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    tl.debug_barrier()  # every warp has read it before another writes the slope there
    tl.store(losses + row, tl.where(counts, log_total - picked, 0.0))
    tl.store(totals + row, tl.where(counts, log_total, float("inf")))
    if SLOPES:
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            slope = tl.exp(x - log_total)
            if SQUARES:
                slope *= 1.0 + twice_z * log_total
            slope -= tl.where(at == target, 1.0, 0.0)
            slope = tl.where(counts, slope, 0.0)
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < vocab)


@triton.jit(do_not_specialize=["shift"])
def _softmax_8(  # type: ignore[no-untyped-def]
    logits, totals, slopes, transposed, rows, vocab, stride, apart, shift, TILE: tl.constexpr
):
    """exp(logit - total) times 2 ** shift. As little for each number as can be: it is bound by that, not by memory."""
    row, column = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    r, c = tl.arange(0, TILE), tl.arange(0, TILE)
    total = tl.load(totals + row + r, mask=row + r < rows, other=float("inf"))
    there = (row + r < rows)[:, None] & (column + c < vocab)[None, :]
    x = tl.load(logits + row * stride + column + r[:, None] * stride + c[None, :], mask=there, other=0.0).to(tl.float32)
    slope = tl.exp2(x * LOG2_E + (shift - total * LOG2_E)[:, None]).to(slopes.dtype.element_ty)
    tl.store(slopes + row * vocab + column + r[:, None] * vocab + c[None, :], slope, mask=there)
    across = (column + c < vocab)[:, None] & (row + r < rows)[None, :]
    if logits.dtype.element_ty == tl.float32:  # as in shoal.kernels.cast
        x = tl.load(logits + row * stride + column + r[None, :] * stride + c[:, None], mask=across, other=0.0)
        turned = tl.exp2(x * LOG2_E + (shift - total * LOG2_E)[None, :]).to(slopes.dtype.element_ty)
    else:
        turned = tl.trans(slope)
    tl.store(transposed + column * apart + row + c[:, None] * apart + r[None, :], turned, mask=across)


@triton.jit(do_not_specialize=["scale"])
def _one_hot_8(logits, targets, totals, slopes, transposed, rows, vocab, stride, apart, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """At the targets, one less."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + r, mask=r < rows, other=-1)
    there = target >= 0
    x = tl.load(logits + r * stride + target, mask=there, other=0.0).to(tl.float32)
    slope = ((tl.exp(x - tl.load(totals + r, mask=there, other=0.0)) - 1.0) * scale).to(slopes.dtype.element_ty)
    tl.store(slopes + r * vocab + target, slope, mask=there)
    tl.store(transposed + target * apart + r, slope, mask=there)
