"""Rounding at random from float32 to bfloat16, by a pure function of seed, step and place.

bfloat16 keeps 8 binary digits. A second moment that falls by 0.1% a step (beta2 0.999) is rounded to what it was, step
after step, and never falls; rounded up or down at random, in proportion, it is right in the mean. The random number of
an element follows from the run's seed, the parameter's name, the step, and the element's place in the whole parameter:
it is the same on every layout and after every restart, and nothing is saved. `shoal.kernels.adamw` makes the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
# Of two bijections of 32 bits: the end of MurmurHash3 (Appleby), and `lowbias32` (Wellons' search).
MURMUR = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
LOWBIAS = (16, 0x7FEB352D, 15, 0x846CA68B, 16)


@dataclass(frozen=True)
class Spot:
    """The part of a parameter that is here: runs of `width` elements that are neighbours in the whole, `rows` runs in a
    plane. Distances are in elements of the whole."""

    key: int  # of the seed and the parameter's name
    base: int  # where the first element is
    width: int
    rows: int
    stride: int  # from a run to the next
    plane: int  # from a plane to the next

    @classmethod
    def of(cls, seed: int, name: str, shape: Sequence[int], box: Sequence[slice]) -> Spot:
        """`box`: the part of the whole of that shape; of at most three dimensions, as a model's parameters are."""
        key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
        missing = 3 - len(shape)
        if missing < 0:
            raise ValueError(f"{name} has {len(shape)} dimensions, and moments in 16 bits are for at most three.")
        planes, rows, width = [slice(0, 1)] * missing + list(box)
        height, stride = ([1] * missing + list(shape))[1:]
        base = (planes.start * height + rows.start) * stride + width.start
        return cls(key, base, max(1, width.stop - width.start), max(1, rows.stop - rows.start), stride, height * stride)

    def keys(self, step: int) -> tuple[int, int]:
        """Two numbers of 32 bits for a step (splitmix64)."""
        x = (self.key + step * 0x9E3779B97F4A7C15) & (2**64 - 1)
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        x ^= x >> 31
        return x & MASK, x >> 32

    def noise(self, step: int, like: Tensor) -> Tensor:
        """A random number below 2**32 for each element of a part (int64)."""
        at = torch.arange(like.numel(), device=like.device)
        run, column = at // self.width, at % self.width
        place = self.base + (run // self.rows) * self.plane + (run % self.rows) * self.stride + column
        first, second = self.keys(step)
        mixed = _mixed((place & MASK) ^ first, MURMUR)
        return _mixed(mixed ^ ((second + (place >> 32)) & MASK), LOWBIAS).view(like.shape)


def _mixed(x: Tensor, by: tuple[int, int, int, int, int]) -> Tensor:
    """In 64 bits that wrap around, of which the lower 32 are those of 32 bits that wrap around."""
    x = ((x ^ (x >> by[0])) * by[1]) & MASK
    x = ((x ^ (x >> by[2])) * by[3]) & MASK
    return x ^ (x >> by[4])


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """float32 that bfloat16 holds exactly: the lower 16 bits are carried or cut off as `noise`, below 2**16, says."""
    return ((values.view(torch.int32) + noise.to(torch.int32)) & -0x10000).view(torch.float32)
