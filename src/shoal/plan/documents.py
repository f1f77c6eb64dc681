"""How packed documents look to attention: what a token sees, and what a kernel computes for it. No torch.

Windows are filled with documents end to end, and a token sees those before it in its own document alone. The kernel of
Shoal's own (`shoal.model.documents`) skips blocks of 128 x 128 pairs that no document reaches into, and computes the
others whole; so it computes more than a token sees, at the edges of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.spec.flops import seen_pairs
from shoal.spec.run import Run
from shoal.spec.shape import Shape

BLOCK = 128  # as shoal.model.documents has it
WHOLE = "every window is taken for one document"
# Tokens of made-up documents that a mean length is turned into.
MADE_UP = 64

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """Numbers a token, on average over tokens and layers."""

    seen: float  # of those that it sees
    computed: float  # of those that the kernel computes for it
    basis: str  # how that is known

    def as_json(self) -> dict[str, Any]:
        return {"seen": self.seen, "computed": self.computed, "basis": self.basis}


def one_document(shape: Shape, seq: int) -> Documents:
    """Where nothing is known of the data, or documents are not kept apart."""
    seen = seen_pairs(shape, np.array([seq])) / (shape.layers * seq)
    return Documents(seen, seq / 2 * shape.attending_layers / shape.layers, WHOLE)


def of_windows(shape: Shape, windows: Sequence[I64], basis: str) -> Documents:
    """Of the stretches of one document in each of some windows, by their lengths."""
    tokens = int(sum(lengths.sum() for lengths in windows)) * shape.layers
    seen = sum(seen_pairs(shape, lengths) for lengths in windows)
    computed = sum(_computed_pairs(shape, lengths) for lengths in windows)
    return Documents(seen / tokens, computed / tokens, basis)


def of_mean(shape: Shape, mean: float, seq: int) -> Documents:
    """Of documents of so many tokens on average, whose lengths are assumed to fall off exponentially."""
    rng = np.random.default_rng(0)
    total = MADE_UP * seq
    ends = np.cumsum(np.ceil(rng.exponential(mean, int(2 * total / mean) + 16)).astype(np.int64))
    cuts = np.union1d(ends[ends < total], np.arange(0, total + 1, seq))
    lengths = np.diff(cuts)
    windows = np.split(lengths, np.searchsorted(cuts, np.arange(seq, total, seq)))
    basis = f"documents of {mean:,.0f} tokens on average, their lengths assumed to fall off exponentially"
    return of_windows(shape, windows, basis)


def mixed(parts: Sequence[tuple[float, Documents]]) -> Documents:
    """Of several sources, by weight."""
    total = sum(weight for weight, _ in parts)
    seen = sum(weight * part.seen for weight, part in parts) / total
    computed = sum(weight * part.computed for weight, part in parts) / total
    return Documents(seen, computed, "; ".join(dict.fromkeys(part.basis for _, part in parts)))


def skips_between(run: Run, shape: Shape, cuda: bool, precision: str) -> bool:
    """Whether the kernel that skips is the one that computes, where no context parallelism has taken its place."""
    width = shape.head_dim
    fast = cuda and run.train.kernels != "plain" and precision != "fp32"
    return fast and run.data.mask_documents and width >= 16 and not width & (width - 1)


def _computed_pairs(shape: Shape, lengths: I64) -> int:
    """A block of queries computes from the block in which the document of its first query begins."""
    begins = np.cumsum(lengths) - lengths
    seq = int(lengths.sum())
    first = np.arange(0, seq, BLOCK)
    own = begins[np.searchsorted(begins, first, side="right") - 1]
    back = first // BLOCK - own // BLOCK + 1
    slides = shape.sliding_layers
    blocks = (shape.attending_layers - slides) * int(back.sum())
    if slides and shape.sliding_window is not None:
        reach = -(-(shape.sliding_window - 1) // BLOCK) + 1
        blocks += slides * int(np.minimum(back, reach).sum())
    return blocks * BLOCK * BLOCK
