"""One token of the logits of each request. The draw of a token is a number made of the request's seed and the token's
position by counting, so it does not depend on what else is computed beside it, nor on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.errors import NumericsError
from shoal.generate.request import Mask, Sampling

FULL = (1 << 64) - 1


@dataclass
class Chooser:
    """How the next token of a request is picked, with what it must remember."""

    sampling: Sampling
    rows: int
    """Tokens that may be drawn: the tokenizer's. A model may have more rows (rounded up), which mean nothing."""
    mask: Mask | None = None
    prompt: Sequence[int] = ()
    answer: list[int] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        """Whether the logits alone decide."""
        return self.sampling.greedy and self.mask is None and not self.sampling.penalized


def pick(logits: Tensor, choosers: Sequence[Chooser]) -> list[int]:
    """Of logits [requests, vocab] a token each. Logits that are not finite are nobody's choice: they are told."""
    if not logits.isfinite().all():
        raise NumericsError("the logits are not finite: the weights are damaged or have diverged.")
    if all(one.plain for one in choosers):
        return _likeliest(logits, choosers)
    return [_one(row, chooser) for row, chooser in zip(logits.float().cpu(), choosers, strict=True)]


def _likeliest(logits: Tensor, choosers: Sequence[Chooser]) -> list[int]:
    rows = {one.rows for one in choosers}
    if len(rows) == 1:
        return [int(token) for token in logits[:, : rows.pop()].argmax(-1)]
    return [int(row[: one.rows].argmax()) for row, one in zip(logits, choosers, strict=True)]


def _one(logits: Tensor, chooser: Chooser) -> int:
    sampling = chooser.sampling
    logits = logits[: chooser.rows]
    if sampling.penalized:
        logits = _penalized(logits, chooser)
    if chooser.mask is not None:
        allowed = chooser.mask.allowed()[: chooser.rows]
        logits = logits.masked_fill(~allowed, -torch.inf)
    if sampling.greedy:
        return int(logits.argmax())
    return drawn(shares(logits, sampling), uniform(sampling.seed, len(chooser.answer)))


def _penalized(logits: Tensor, chooser: Chooser) -> Tensor:
    sampling, logits = chooser.sampling, logits.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*chooser.prompt, *chooser.answer}))
        seen = seen[seen < chooser.rows]
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if chooser.answer and (sampling.presence_penalty or sampling.frequency_penalty):
        said, counts = torch.tensor(chooser.answer).unique(return_counts=True)
        logits[said] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return logits


def shares(logits: Tensor, sampling: Sampling) -> Tensor:
    """How likely each token [vocab] is to be drawn, in float64; those left out are 0."""
    logits = logits.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1.0:
        falling, order = logits.sort(descending=True, stable=True)
        before = falling.softmax(-1).cumsum(-1) - falling.softmax(-1)
        out = before >= sampling.top_p
        out[0] = False  # one is left whatever was asked
        logits = logits.masked_fill(torch.zeros_like(out).scatter(0, order, out), -torch.inf)
    found = logits.softmax(-1)
    if sampling.min_p > 0.0:
        found = found.masked_fill(found < sampling.min_p * found.max(), 0.0)
    return found


def drawn(shares: Tensor, where: float) -> int:
    """The token at `where`, from 0 to 1, of all shares one after the other."""
    sums = shares.cumsum(-1)
    token = int(torch.searchsorted(sums, where * float(sums[-1]), right=True))
    return min(token, int(shares.nonzero()[-1]))  # the sum's last digits are not its own


def uniform(seed: int, position: int) -> float:
    """In [0, 1), by SplitMix64 of both."""
    return (_mixed(_mixed(seed & FULL) ^ position) >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & FULL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & FULL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & FULL
    return x ^ (x >> 31)
