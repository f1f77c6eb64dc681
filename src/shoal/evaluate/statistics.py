"""How sure a mean is: an interval that holds the true one as often as it says.

Items of a task are a sample of all the items that could have been asked. Shares of right answers get Wilson's interval,
which stays right near 0 and 1 where mean ± 1.96 stderr does not; other values get Student's t. Items that hang together
(ten questions about one passage) are no ten independent answers: with `clusters` the error is that of the clusters.
An interval that ignores them holds the truth in three cases of four in place of nineteen of twenty (decision 090).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.evaluate.distributions import t_quantile

Floats = NDArray[np.float64]
Values = Sequence[float] | NDArray[Any]


@dataclass(frozen=True)
class Interval:
    """A mean and where the true one lies. Where nothing can be said (one item, one cluster) the bounds are those of
    the values that are possible: 0 and 1 for shares, else infinite."""

    mean: float
    low: float
    high: float
    stderr: float
    """As lm-eval has it where there are no clusters: the sample's standard deviation / sqrt(n)."""
    n: int
    """Items."""
    method: str
    clusters: int | None = None
    level: float = 0.95


@dataclass(frozen=True)
class Error:
    """The variance of a mean, and how many degrees of freedom it was estimated with."""

    variance: float
    df: float


def interval(values: Values, clusters: Sequence[Hashable] | None = None, level: float = 0.95) -> Interval:
    """Of the mean of some items' values. `clusters` says for each item what it hangs together with."""
    x = finite(values)
    if not 0 < level < 1:
        raise ValueError(f"a level of {level} is no share between 0 and 1")
    mean, shares = float(x.mean()), is_shares(x)
    if clusters is None:
        error = error_of(x, None)
        if shares:
            # The normal's quantile: the variance of a share is known from the share.
            low, high = wilson(mean, len(x), t_quantile(0.5 + level / 2, math.inf))
            return Interval(mean, low, high, math.sqrt(error.variance), len(x), "wilson", level=level)
        return _by_t(x, error, level, "t", None)
    numbers = numbered(clusters, len(x))
    groups = int(numbers.max()) + 1
    error = error_of(x, numbers)
    if not shares:
        return _by_t(x, error, level, "clustered t", groups)
    if error.df <= 0:
        return Interval(mean, 0.0, 1.0, 0.0, len(x), "one cluster", groups, level)
    low, high = wilson(mean, _as_many(x, error, groups), t_quantile(0.5 + level / 2, error.df))
    return Interval(mean, low, high, math.sqrt(error.variance), len(x), "clustered wilson", groups, level)


def interval_of_ratio(
    tops: Values,
    bottoms: Values,
    clusters: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> Interval:
    """Of sum(tops) / sum(bottoms): bits per byte, or a loss per token, where items are of unlike lengths. By
    linearisation: to first order the ratio errs as the mean of (top - ratio * bottom) / mean(bottom) does."""
    top, bottom = finite(tops), finite(bottoms)
    if len(top) != len(bottom) or bottom.sum() <= 0:
        raise ValueError("a ratio needs as many tops as bottoms, and a sum of bottoms above 0")
    ratio = float(top.sum() / bottom.sum())
    errs = (top - ratio * bottom) / bottom.mean()
    error = error_of(errs, None if clusters is None else numbered(clusters, len(top)))
    groups = None if clusters is None else len(set(clusters))
    return _by_t(errs + ratio, error, level, "ratio" if clusters is None else "clustered ratio", groups)


def error_of(x: Floats, numbers: NDArray[np.int64] | None) -> Error:
    """Of the mean of x. With clusters: how much the mean moves when one of them is left out (the jackknife, CR3). For
    clusters of one size that is the usual sandwich with clusters - 1 degrees of freedom; where few are large, the
    sandwich is too narrow (it held the truth in 87 to 93 of 100 cases, this in 94: decision 090)."""
    n = len(x)
    if numbers is None:
        return Error(float(x.var(ddof=1)) / n, n - 1.0) if n > 1 else Error(0.0, 0.0)
    sizes = np.bincount(numbers).astype(np.float64)
    groups, share = len(sizes), sizes / n
    if groups < 2:
        return Error(0.0, 0.0)
    moved = np.bincount(numbers, weights=x - x.mean()) / (n * (1 - share))
    return Error(float((moved**2).sum()) * (groups - 1) / groups, _degrees(sizes, share))


def _degrees(sizes: Floats, share: Floats) -> float:
    """Of freedom, as Bell and McCaffrey count them: trace(A)² / trace(A²) for A, the covariance of the clusters'
    adjusted sums. Off the diagonal A_gh² = off_g * off_h, so no matrix is built."""
    off = sizes * share / (1 - share)
    return float(sizes.sum()) ** 2 / float((sizes**2).sum() + off.sum() ** 2 - (off**2).sum())


def wilson(share: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share among n; n need not be whole."""
    wide = z * z / n
    middle = (share + wide / 2) / (1 + wide)
    half = z / (1 + wide) * math.sqrt(share * (1 - share) / n + wide / (4 * n))
    # At 0 and 1 the bound is exactly that; rounding must not put the mean outside of its interval.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def _as_many(x: Floats, error: Error, groups: int) -> float:
    """As many independent answers as these tell as much as. Where all answers are the same the values do not say how
    much they hang together: they count as one a cluster. Never more than there are."""
    spread = float(x.mean() * (1 - x.mean()))
    if spread == 0:
        return float(groups)
    return float(len(x)) if error.variance <= spread / len(x) else max(1.0, spread / error.variance)


def _by_t(x: Floats, error: Error, level: float, method: str, groups: int | None) -> Interval:
    mean, stderr = float(x.mean()), math.sqrt(error.variance)
    if error.df <= 0:
        alone = "one item" if len(x) == 1 else "one cluster"
        return Interval(mean, -math.inf, math.inf, 0.0, len(x), alone, groups, level)
    half = t_quantile(0.5 + level / 2, error.df) * stderr
    return Interval(mean, mean - half, mean + half, stderr, len(x), method, groups, level)


def finite(values: Values) -> Floats:
    """As numbers, at least one, all finite."""
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise DataError("there is no item to take a mean of: the task gave no values.")
    if not np.isfinite(x).all():
        raise DataError(
            f"the value of item {int(np.flatnonzero(~np.isfinite(x))[0])} is not finite, so their mean says nothing; "
            "look at that item, or at the model's numbers."
        )
    return x


def is_shares(x: Floats) -> bool:
    """Whether every value is 0 or 1."""
    return bool(((x == 0) | (x == 1)).all())


def numbered(clusters: Sequence[Hashable], n: int) -> NDArray[np.int64]:
    """Clusters by number, from 0, in order of appearance."""
    if len(clusters) != n:
        raise ValueError(f"{len(clusters)} clusters for {n} items")
    known: dict[Hashable, int] = {}
    return np.fromiter((known.setdefault(name, len(known)) for name in clusters), np.int64, n)
