"""Triton kernels for what torch does in several passes over memory. Each has a plain twin, and tests compare them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from torch import Tensor

_allowed = importlib.util.find_spec("triton") is not None  # in this process, which has one run


def allow(yes: bool) -> None:
    """`train.kernels`: `plain` keeps to torch's own."""
    global _allowed
    _allowed = yes and importlib.util.find_spec("triton") is not None


def fit(tensors: Iterable[Tensor]) -> bool:
    """Whether kernels can be used for these."""
    return _allowed and all(t.is_cuda for t in tensors)
