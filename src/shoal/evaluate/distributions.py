"""The few distributions that intervals and tests need, without scipy: Student's t and the binomial of a fair coin."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

NORMAL = NormalDist()
_LARGE = 1e7  # degrees of freedom from which t is the normal, to twelve digits and more


def t_cdf(t: float, df: float) -> float:
    """The share of Student's t below a value."""
    if df >= _LARGE or math.isinf(t):
        return NORMAL.cdf(t) if not math.isinf(t) else float(t > 0)
    tail = 0.5 * incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=4096)
def t_quantile(share: float, df: float) -> float:
    """The value below which so much of Student's t lies."""
    if df >= _LARGE:
        return NORMAL.inv_cdf(share)
    if share < 0.5:
        return -t_quantile(1 - share, df)
    low, high = 0.0, 2.0
    while t_cdf(high, df) < share:
        low, high = high, high * 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < share else (low, middle)
    return (low + high) / 2


def two_sided_t(t: float, df: float) -> float:
    """The probability of a value at least so far from 0."""
    return min(1.0, 2 * t_cdf(-abs(t), df))


def two_sided_coin(heads: int, tosses: int) -> float:
    """The exact probability that a fair coin falls at least as unevenly."""
    fewer = min(heads, tosses - heads)
    if 2 * fewer == tosses:
        return 1.0
    if fewer == tosses // 2:  # as even as an odd number can be
        return 1.0
    # The largest term by logarithms (2 ** tosses leaves every float), the smaller ones by their ratios.
    term = math.exp(
        math.lgamma(tosses + 1) - math.lgamma(fewer + 1) - math.lgamma(tosses - fewer + 1) - tosses * math.log(2)
    )
    whole = 0.0
    for k in range(fewer, -1, -1):
        whole += term
        if term < whole * 1e-17:
            break
        term *= k / (tosses - k + 1)
    return min(1.0, 2 * whole)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's way of evaluating it)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, the other end is quick
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _away(1 + even * d, tiny)
        c = _away(1 + even / c, tiny)
        value *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away(1 + odd * d, tiny)
        c = _away(1 + odd / c, tiny)
        value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * value


def _away(value: float, tiny: float) -> float:
    """Not 0, by which the fraction would be divided."""
    return value if abs(value) > tiny else tiny
