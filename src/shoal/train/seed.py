"""What is random in a step depends on the seed and the step's number alone: there is no generator's state to lose."""

from __future__ import annotations

import torch
import xxhash


def seed_step(seed: int, step: int, reader: int) -> None:
    """Seeds torch's generators. `reader` is the data-parallel rank: those that share a batch draw the same."""
    torch.manual_seed(seed_of(seed, step, reader))


def seed_of(seed: int, step: int, reader: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {reader}".encode()) >> 1
