"""Without a cache: each token from the whole context again. For models of which nothing more is known than that they
turn tokens into logits (own models, classes of transformers), and those whose angles change with the length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.model.decoder import Decoder


@dataclass
class Text:
    tokens: list[int] = field(default_factory=list)
    cached: int = 0


class Whole:
    """A `Runner`."""

    def __init__(self, model: Decoder, context: int) -> None:
        self.model, self.context = model, context

    def admit(self, tokens: Sequence[int], most: int, version: str) -> Text:
        return Text()

    def release(self, seat: Text) -> None:
        seat.tokens = []

    def prefill(self, seat: Text, tokens: Sequence[int], every: bool) -> Tensor:
        seat.tokens.extend(tokens)
        logits = self._of([seat])[0]
        return logits[-len(tokens) :] if every else logits[-1:]

    def decode(self, seats: Sequence[Text], tokens: Sequence[int]) -> Tensor:
        for seat, token in zip(seats, tokens, strict=True):
            seat.tokens.append(token)
        by_length: dict[int, list[int]] = {}
        for i, seat in enumerate(seats):
            by_length.setdefault(len(seat.tokens), []).append(i)
        rows: dict[int, Tensor] = {}
        for which in by_length.values():  # rows of one length need no mask, which an own model may not know
            logits = self._of([seats[i] for i in which])
            rows |= {i: logits[k, -1] for k, i in enumerate(which)}
        return torch.stack([rows[i] for i in range(len(seats))])

    @torch.no_grad()
    def _of(self, seats: Sequence[Text]) -> Tensor:
        device = next(self.model.parameters()).device
        logits: Tensor = self.model(torch.tensor([seat.tokens for seat in seats], device=device))
        return logits
