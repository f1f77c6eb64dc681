"""Logits to their gradient in place: one pass of memory in and one out, where log_softmax, exp and a cast take five."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # of the vocabulary, at a time: the second reading of a row comes from the cache


def cross_entropy_(logits: Tensor, targets: Tensor, slopes: bool) -> Tensor:
    """The cross-entropy of each row of `logits` [tokens, vocab], float32 [tokens]; 0 where the target is negative.

    With `slopes` the logits become the gradient of the sum of these.
    """
    assert logits.stride(1) == 1
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    _cross_entropy[(logits.shape[0],)](
        logits, targets, losses, logits.shape[1], logits.stride(0), SLOPES=slopes, BLOCK=block, num_warps=16
    )
    return losses


@triton.jit
def _cross_entropy(logits, targets, losses, vocab, stride, SLOPES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
    tl.store(losses + row, tl.where(counts, log_total - picked, 0.0))
    if SLOPES:
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            slope = tl.exp(x - log_total) - tl.where(at == target, 1.0, 0.0)
            slope = tl.where(counts, slope, 0.0)
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < vocab)
