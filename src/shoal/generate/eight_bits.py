"""Weights of 8 bits for decoding: whole numbers and a factor for each row, so that a step reads half as much."""

from __future__ import annotations

import torch

from shoal.kernels.decode_products import Weight

MOST = 127


def quantised(weight: Weight) -> Weight:
    """The nearest values, by the largest number of each row."""
    matrix = weight.matrix.float()
    factors = (matrix.abs().amax(dim=1) / MOST).clamp(min=torch.finfo(torch.float32).tiny)
    whole = (matrix / factors[:, None]).round_().to(torch.int8)
    return Weight(whole, weight.bias, factors)
