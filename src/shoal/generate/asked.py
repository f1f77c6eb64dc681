"""What a decode step on a GPU is asked for, a row of numbers for each sequence (`shoal.kernels.decode_pick`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.generate.pick import Chooser, drawn, shares, uniform
from shoal.generate.request import Sampling

POSITION, TOKEN, SEAT, WHERE, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(8)
NOBODY = (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""A row that fills a batch."""


def row_asked(
    sampling: Sampling, position: int, token: int, seat: int, drawn: int
) -> tuple[float, float, float, float, float, float, float, float]:
    """`position` of the token that comes in (negative: what the seat picked last); `drawn`: tokens of the answer that
    were picked before this one, which its uniform number counts by."""
    where = 0.0 if sampling.greedy else uniform(sampling.seed, drawn)
    top_k = sampling.top_k or 0
    return position, token, seat, where, sampling.temperature, top_k, sampling.top_p, sampling.min_p


def drawn_there(chooser: Chooser) -> bool:
    """Whether the device can pick for it. A grammar and penalties look at what was said: the host picks."""
    return chooser.mask is None and not chooser.sampling.penalized and not chooser.sampling.logprobs


def picked_plainly(logits: Tensor, asked: Tensor, last: Tensor, vocabulary: int) -> Tensor:
    """As `shoal.kernels.decode_pick.pick`, by torch."""
    told = torch.full((len(logits), 2), -1.0, dtype=torch.float64, device=logits.device)
    for row, (numbers, line) in enumerate(zip(asked.tolist(), logits, strict=True)):
        if numbers[POSITION] < 0:
            continue
        spread = F.log_softmax(line, -1, dtype=torch.float32)
        token = _one(line[:vocabulary].float().cpu(), numbers) if spread.isfinite().all() else -1
        last[int(numbers[SEAT])] = token
        told[row, 0], told[row, 1] = token, spread[max(token, 0)]
    return told


def _one(logits: Tensor, asked: list[float]) -> int:
    if not asked[TEMPERATURE]:
        return int(logits.argmax())
    sampling = Sampling(
        temperature=asked[TEMPERATURE],
        top_k=int(asked[TOP_K]) or None,
        top_p=asked[TOP_P],
        min_p=asked[MIN_P],
    )
    return drawn(shares(logits, sampling), asked[WHERE])
