"""Batches on their way to a GPU: one copy out of pinned memory, which nobody waits for.

A copy from ordinary memory is made through a buffer of the driver's, and the host stands by until it is done. What is
pinned the device fetches by itself. Token numbers, positions and documents fit in 32 bits: half the bytes; on the
device they become the 64 bits that an embedding and a loss ask for. torch keeps pinned memory for the next batch, and
knows when a copy out of it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor


def on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of whole numbers, as tensors of the same types and shapes."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return in_one_copy(arrays, device, pin=device.type == "cuda")


def in_one_copy(arrays: Sequence[np.ndarray], device: torch.device, pin: bool) -> list[Tensor]:
    places = list(pairwise(accumulate((array.size for array in arrays), initial=0)))
    packed = torch.empty(places[-1][1], dtype=torch.int32, device="cpu", pin_memory=pin)
    for array, (first, end) in zip(arrays, places, strict=True):
        np.copyto(packed[first:end].numpy().reshape(array.shape), array, casting="same_kind")
    there = packed.to(device, non_blocking=pin)
    return [  # each in memory of its own: compiled code wants it aligned
        there[first:end].view(array.shape).to(torch.from_numpy(array[:0]).dtype, copy=True)
        for array, (first, end) in zip(arrays, places, strict=True)
    ]
