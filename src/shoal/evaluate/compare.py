"""Whether two models differ on the same items, and what difference so many items could have shown.

Both answered the same items, so the difference is taken item by item: what is hard for both cancels out, and far fewer
items show the same difference. A test that finds nothing is told together with the smallest difference that it would
have found in four cases of five.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.evaluate.distributions import NORMAL, t_quantile, two_sided_coin, two_sided_t
from shoal.evaluate.statistics import Floats, Values, error_of, finite, is_shares, numbered

POWER = 0.8
_EXACT_UNITS = 14  # 2 ** 14 ways of signs are all tried
_FLIPS = 9_999
_MOST_UNITS = 5_000  # beyond, sums of so many differences are normal, and flips would only take time
_SEED = 0x5EED


@dataclass(frozen=True)
class Paired:
    """a - b over the same items."""

    difference: float
    low: float
    high: float
    p: float
    """How often as large a difference would be seen if there were none."""
    method: str
    n: int
    """Items."""
    detectable: float
    """The smallest true difference that so many items show in four cases of five, at a level of 95%."""
    shares: bool
    """Whether the values are 0 or 1, and the difference is one of shares."""
    clusters: int | None = None


def paired(a: Values, b: Values, clusters: Sequence[Hashable] | None = None) -> Paired:
    """The values of two models for the same items in the same order."""
    first, second = finite(a), finite(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values against {len(second)}: a paired test needs the same items")
    gap = first - second
    n, shares = len(gap), is_shares(first) and is_shares(second)
    if clusters is None and shares:
        return _of_shares(gap)
    numbers = None if clusters is None else numbered(clusters, n)
    groups = None if numbers is None else int(numbers.max()) + 1
    error = error_of(gap, numbers)
    units: Floats = gap if numbers is None else np.bincount(numbers, weights=gap).astype(np.float64)
    difference = float(gap.mean())
    if error.df <= 0:
        bound = 1.0 if shares else math.inf
        return Paired(difference, -bound, bound, 1.0, "nothing to compare", n, bound, shares, groups)
    stderr = math.sqrt(error.variance)
    p, method = _by_signs(units, difference / stderr if stderr else 0.0, error.df)
    half = t_quantile(0.975, error.df) * stderr
    seen = (t_quantile(0.975, error.df) + t_quantile(POWER, error.df)) * stderr
    low, high = difference - half, difference + half
    if shares:
        low, high, seen = max(low, -1.0), min(high, 1.0), min(seen, 1.0)
    kind = method if numbers is None else f"clustered {method}"
    return Paired(difference, low, high, p, kind, n, seen, shares, groups)


def _of_shares(gap: Floats) -> Paired:
    """McNemar's exact test: only items that one of them got right and the other did not say anything. The interval is
    Bonett and Price's: one such item is added each way, with which it holds the truth also where there are few."""
    n, better, worse = len(gap), int((gap > 0).sum()), int((gap < 0).sum())
    up, down = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    stderr = math.sqrt(max(0.0, up + down - (up - down) ** 2) / (n + 2))
    low, high = up - down - NORMAL.inv_cdf(0.975) * stderr, up - down + NORMAL.inv_cdf(0.975) * stderr
    difference = (better - worse) / n
    return Paired(
        difference,
        max(-1.0, min(low, difference)),
        min(1.0, max(high, difference)),
        two_sided_coin(better, better + worse),
        "mcnemar",
        n,
        min(1.0, (NORMAL.inv_cdf(0.975) + NORMAL.inv_cdf(POWER)) * stderr),
        True,
    )


def _by_signs(units: Floats, t: float, df: float) -> tuple[float, str]:
    """If there is no difference, every one is as likely with the other sign: how many of those sums are as far from 0.
    The same numbers give the same p, for the signs are drawn from a seed."""
    told = units[units != 0]
    if not len(told):
        return 1.0, "sign flips"
    if len(told) > _MOST_UNITS:
        return two_sided_t(t, df), "t"
    seen = abs(float(told.sum())) * (1 - 1e-12)  # equal sums in another order are equal
    if len(told) <= _EXACT_UNITS:
        ways = np.arange(1 << len(told))[:, None] >> np.arange(len(told)) & 1
        return float((np.abs((1 - 2 * ways) @ told) >= seen).mean()), "sign flips"
    rng, as_far, left = np.random.default_rng(_SEED), 0, _FLIPS
    while left:
        rows = min(left, 1_000)
        signs = rng.integers(0, 2, (rows, len(told)), dtype=np.int8) * 2 - 1
        as_far += int((np.abs(signs @ told) >= seen).sum())
        left -= rows
    return (as_far + 1) / (_FLIPS + 1), "sign flips"


def holm(ps: Sequence[float]) -> list[float]:
    """The p of several tests, corrected for how many there are: of twenty tests one is below 0.05 by chance."""
    order = sorted(range(len(ps)), key=lambda k: ps[k])
    corrected, most = [0.0] * len(ps), 0.0
    for rank, k in enumerate(order):
        most = max(most, min(1.0, ps[k] * (len(ps) - rank)))
        corrected[k] = most
    return corrected


def items_for(found: Paired, difference: float) -> int:
    """How many items like these would show a true difference in four cases of five."""
    return math.ceil(found.n * (found.detectable / difference) ** 2)


def sentence(
    found: Paired,
    a: str = "this",
    b: str = "the other",
    *,
    p: float | None = None,
    higher_is_better: bool = True,
    unit: str = "",
) -> str:
    """What the numbers say, for people. `p` where it was corrected for several tasks; shares are told in points."""
    p = found.p if p is None else p
    scale, unit = (100.0, "points") if found.shares else (1.0, unit)
    words = f" {unit}" if unit else ""
    items = f"{found.n:,} items" if found.n != 1 else "1 item"
    if found.clusters is not None:
        items += f" in {found.clusters:,} clusters"
    if p < 0.05:
        side = "better" if (found.difference > 0) == higher_is_better else "worse"
        bounds = f"{_plain(found.low * scale)} to {_plain(found.high * scale)}"
        return (
            f"{a} is {_plain(abs(found.difference) * scale)}{words} {side} than {b} on {items} "
            f"({a} - {b}: 95% interval {bounds}; p {_chance(p)})."
        )
    none = f"no difference can be seen with {items}"
    if not math.isfinite(found.detectable):
        return f"{none}: they are too few to say anything."
    if found.detectable == 0:
        return f"{none}: {a} and {b} have the same value for every one."
    if found.shares:
        wanted, name = (0.01, "1 point") if found.detectable > 0.01 else (0.001, "0.1 points")
        return f"{none}; {items_for(found, wanted):,} would show {name}."
    seen = f"{none}; they would show {_plain(found.detectable)}{words}"
    if found.difference == 0:
        return f"{seen}."
    more = items_for(found, found.difference)
    return f"{seen}, and {more:,} the {_plain(abs(found.difference))} that was seen." if more > found.n else f"{seen}."


def _plain(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.1 else f"= {p:.2f}"
