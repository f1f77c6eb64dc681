"""How weights become counts: a mixture is laid out in blocks, each with the same whole number of samples a source.

So a source's share of any whole number of blocks is exact, and where the k-th sample of a source stands is arithmetic,
not a running count: that is what keeps a mixture random access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from shoal.errors import SpecError

# Decimal, since people write decimal weights: 0.7 and 0.3 are exact in the smallest block.
BLOCK_SIZES = (1_000, 10_000, 100_000, 1_000_000)
WANTED_ERROR = Fraction(1, 100)


@dataclass(frozen=True)
class Quotas:
    block: int
    """Samples in a block."""
    counts: tuple[int, ...]
    """Samples of each source in a block; they sum to `block`."""


def quotas(weights: Sequence[float]) -> Quotas:
    """The smallest block size in which every source gets its share within 1% of it, or else the largest block size.

    A weight too small to get one place in the largest block is refused: it would never be read.
    """
    if not all(0 < w < float("inf") for w in weights):
        raise SpecError(f"the weights of a mixture must be above zero and finite, and these are {list(weights)}.")
    exact = [Fraction(w) for w in weights]
    total = sum(exact)
    shares = [w / total for w in exact]
    for block in BLOCK_SIZES:
        counts = _largest_remainder(shares, block)
        if all(abs(Fraction(c, block) - s) <= s * WANTED_ERROR for c, s in zip(counts, shares, strict=True)):
            break
    if 0 in counts:
        k = counts.index(0)
        raise SpecError(
            f"source {k + 1} of the mixture has weight {weights[k]:g}, less than one sample in {block:,}, so it "
            "would not be read; raise its weight or leave it out."
        )
    return Quotas(block, tuple(counts))


def _largest_remainder(shares: Sequence[Fraction], seats: int) -> list[int]:
    """Whole seats by share: everybody's floor, then one more each to the largest remainders, ties to the earlier."""
    counts = [int(s * seats) for s in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k] * seats, k))
    for k in by_remainder[: seats - sum(counts)]:
        counts[k] += 1
    return counts
