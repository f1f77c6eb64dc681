"""What a token of a model that is not Shoal's sees: found by trying, before anything is trained.

Tokens of one document are changed, and logits of the next must not change with them; the last token is changed, and
logits before it must not. A class says neither of itself, and a loss shows neither. Many begin with parts at or near
zero (a head, the way out of attention, gates), through which nothing would be seen: these get numbers meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from shoal.model.own_model import OwnModel

TOLERANCE = 1e-4  # of the largest logit; experts that are computed together round otherwise
STILL = 1e-3  # a tensor without a larger number hides what comes through it
SPREAD = 0.1  # of the numbers in its place


@dataclass(frozen=True)
class Seen:
    before: bool  # a token sees what stands before its document
    after: bool  # a token sees what comes after it


@torch.no_grad()
def seen(model: OwnModel, length: int) -> Seen:
    """Of a model that is not laid out yet, in rows of at most `length` tokens."""
    half, words = max(1, min(length, 16) // 2), model.shape.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(words, (2, 2 * half), generator=generator)
    positions = torch.arange(half).repeat(2).expand_as(tokens)
    documents = torch.arange(2).repeat_interleave(half).expand_as(tokens)
    other = tokens.clone()
    other[:, :half] = (other[:, :half] + 1 + torch.randint(max(words - 1, 1), (2, half), generator=generator)) % words
    later = tokens.clone()
    later[:, -1] = (later[:, -1] + 1) % words
    for stirring in (True, False):  # a root of what stands still has no number where that becomes negative
        with quiet(model), _stirred(model, generator) if stirring else nullcontext():
            first, apart, causal = (model(some, positions, documents) for some in (tokens, other, later))
        if all(bool(logits.isfinite().all()) for logits in (first, apart, causal)):
            break
    most = TOLERANCE * float(first.abs().max())
    return Seen(
        before=float((first - apart)[:, half:].abs().max()) > most,
        after=float((first - causal)[:, :-1].abs().max()) > most,
    )


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Without dropout. Modes, and what a forward pass counts, are as they were afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    try:
        yield
    finally:
        for module, trained in modes:
            module.training = trained
        for buffer, before in kept:
            buffer.copy_(before)


@contextmanager
def _stirred(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Nothing in it stands still. As it was afterwards, to the bit."""
    still = [p for p in model.parameters() if p.numel() and float(p.abs().max()) < STILL]
    kept = [p.clone() for p in still]
    try:
        for p in still:
            p.normal_(std=SPREAD, generator=generator)
        yield
    finally:
        for p, before in zip(still, kept, strict=True):
            p.copy_(before)
