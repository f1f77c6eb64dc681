"""What a decode step on a GPU is asked for, a row of numbers for each sequence (`shoal.kernels.decode_pick`)."""

from __future__ import annotations

from shoal.generate.pick import Chooser, uniform
from shoal.generate.request import Sampling

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
