"""What a token of a model that is not Shoal's sees: found by trying, before anything is trained.

Tokens of one document are changed, and logits of the next must not change with them; the last token is changed, and
logits before it must not. A class says neither of itself, and a loss shows neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.model.own_model import OwnModel

TOLERANCE = 1e-4  # of the largest logit; experts that are computed together round otherwise


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
    other[:, :half] = (other[:, :half] + 1 + torch.randint(words - 1, (2, half), generator=generator)) % words
    later = tokens.clone()
    later[:, -1] = (later[:, -1] + 1) % words
    trained = model.training
    model.eval()
    try:
        first = model(tokens, positions, documents)
        apart, causal = (model(changed, positions, documents) for changed in (other, later))
    finally:
        model.train(trained)
    most = TOLERANCE * float(first.abs().max())
    return Seen(
        before=float((first - apart)[:, half:].abs().max()) > most,
        after=float((first - causal)[:, :-1].abs().max()) > most,
    )
