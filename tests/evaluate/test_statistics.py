"""Intervals hold the true mean as often as they say, and tests find a difference where there is none as rarely."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.errors import DataError
from shoal.evaluate.compare import POWER, holm, items_for, paired, sentence
from shoal.evaluate.distributions import t_cdf, t_quantile, two_sided_coin
from shoal.evaluate.statistics import interval, interval_of_ratio, wilson

TIMES = 3000


def covered(bounds: list[tuple[float, float]], truth: float) -> float:
    return float(np.mean([low <= truth <= high for low, high in bounds]))


@pytest.mark.parametrize("truth", [0.25, 0.6, 0.93])
def test_shares_are_covered_as_often_as_said(truth: float) -> None:
    rng = np.random.default_rng(1)
    right = rng.random((TIMES, 200)) < truth
    found = [interval(row) for row in right]
    assert abs(covered([(f.low, f.high) for f in found], truth) - 0.95) < 0.015
    assert {f.method for f in found} == {"wilson"}


@pytest.mark.parametrize(("passages", "questions"), [(30, 10), (12, 25)])
def test_clustered_shares_are_covered_and_ignoring_clusters_is_not(passages: int, questions: int) -> None:
    """30 passages with 10 questions each; a passage is easy or hard as a whole."""
    rng = np.random.default_rng(2)
    easy = rng.beta(1.5, 1.0, (TIMES, passages))
    right = rng.random((TIMES, passages, questions)) < easy[:, :, None]
    names = np.repeat(np.arange(passages), questions).tolist()
    rows = right.reshape(TIMES, -1)
    with_clusters = [interval(row, names) for row in rows]
    assert abs(covered([(f.low, f.high) for f in with_clusters], 0.6) - 0.95) < 0.015
    without = [wilson(float(row.mean()), len(row), 1.96) for row in rows]
    assert covered(without, 0.6) < 0.85


def test_clusters_of_unlike_sizes_are_covered() -> None:
    rng = np.random.default_rng(3)
    sizes = np.array([30, 20, 15, 15] + [5] * 16 + [2] * 20)
    names = np.repeat(np.arange(len(sizes)), sizes)
    level = rng.normal(size=(TIMES, len(sizes)))
    rows = 2 + level[:, names] + rng.normal(size=(TIMES, len(names)))
    found = [interval(row, names.tolist()) for row in rows]
    assert abs(covered([(f.low, f.high) for f in found], 2.0) - 0.95) < 0.015
    right = [interval(row, names.tolist()) for row in (rows > 2).astype(float)]
    assert 0.93 <= covered([(f.low, f.high) for f in right], 0.5) <= 0.975


def test_other_values_are_covered() -> None:
    rng = np.random.default_rng(4)
    found = [interval(row) for row in rng.normal(3, 2, (TIMES, 12))]
    assert abs(covered([(f.low, f.high) for f in found], 3.0) - 0.95) < 0.015
    ratios = []
    for _ in range(TIMES):
        size = rng.integers(20, 200, 60).astype(float)
        ratios.append(interval_of_ratio(size * rng.gamma(4, 0.3, 60), size))
    assert abs(covered([(f.low, f.high) for f in ratios], 1.2) - 0.95) < 0.015


def test_no_difference_is_found_as_rarely_as_said() -> None:
    rng = np.random.default_rng(5)
    skill = rng.random((800, 300))
    a, b = rng.random((800, 300)) < skill, rng.random((800, 300)) < skill
    found = [paired(x, y) for x, y in zip(a, b, strict=True)]
    assert 0.025 <= np.mean([f.p < 0.05 for f in found]) <= 0.055  # exact: never more, and somewhat less
    assert abs(covered([(f.low, f.high) for f in found], 0.0) - 0.95) < 0.02
    some = [paired(rng.normal(size=10), rng.normal(size=10)) for _ in range(400)]
    assert 0.025 <= np.mean([f.p < 0.05 for f in some]) <= 0.08


def test_clusters_of_differences_are_no_independent_evidence() -> None:
    rng = np.random.default_rng(6)
    names = np.repeat(np.arange(10), 20)
    wrong_with, wrong_without = [], []
    for _ in range(300):
        # Which of the two is better at a passage differs from passage to passage, and is nothing on the whole.
        likes = 0.5 + 0.4 * rng.choice([-1, 1], 10)[names]
        a, b = rng.random(200) < likes, rng.random(200) < 1 - likes
        wrong_with.append(paired(a, b, names.tolist()).p < 0.05)
        wrong_without.append(paired(a, b).p < 0.05)
    assert np.mean(wrong_with) <= 0.085
    assert np.mean(wrong_without) > 0.3


def test_the_detectable_difference_is_found_in_four_cases_of_five() -> None:
    rng = np.random.default_rng(7)
    gaps = rng.normal(0, 1, (600, 14))
    detectable = float(np.mean([paired(row, np.zeros(14)).detectable for row in gaps]))
    found = [interval(row + detectable) for row in gaps]
    assert abs(np.mean([f.low > 0 for f in found]) - POWER) < 0.05


@pytest.mark.parametrize(
    ("share", "df", "expected"),  # printed tables of Student's t
    [(0.975, 1, 12.7062), (0.975, 29, 2.04523), (0.95, 5, 2.01505), (0.025, 10, -2.22814), (0.8, 60, 0.84765)],
)
def test_quantiles_are_those_of_the_tables(share: float, df: float, expected: float) -> None:
    assert t_quantile(share, df) == pytest.approx(expected, abs=1e-4)
    assert t_cdf(t_quantile(share, df), df) == pytest.approx(share, abs=1e-10)


def test_a_coin_is_counted_exactly() -> None:
    for tosses in range(1, 40):
        for heads in range(tosses + 1):
            far = abs(heads - tosses / 2)
            ways = sum(math.comb(tosses, k) for k in range(tosses + 1) if abs(k - tosses / 2) >= far)
            assert two_sided_coin(heads, tosses) == pytest.approx(ways / 2**tosses, rel=1e-12)
    assert two_sided_coin(0, 0) == 1
    assert two_sided_coin(5_000, 20_000) < 1e-300
    assert two_sided_coin(9_900, 20_000) == pytest.approx(0.159, abs=0.001)


def test_edges_say_what_is_known() -> None:
    assert interval([1.0] * 10).high == 1.0
    assert 0.6 < interval([1.0] * 10).low < 0.8
    one = interval([0.5])
    assert (one.low, one.high, one.method) == (-math.inf, math.inf, "one item")
    alone = interval([0, 1, 1], ["x"] * 3)
    assert (alone.low, alone.high) == (0.0, 1.0)
    same = interval([1.0] * 100, [k // 10 for k in range(100)])
    assert same.low == pytest.approx(wilson(1.0, 10, t_quantile(0.975, 9))[0])  # ten clusters, not a hundred answers
    with pytest.raises(DataError, match="item 1 is not finite"):
        interval([0.0, math.nan])
    with pytest.raises(DataError, match="no item"):
        interval([])


def test_the_error_of_shares_is_that_of_lm_eval() -> None:
    values = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    mean = sum(values) / 6
    expected = math.sqrt(sum((v - mean) ** 2 for v in values) / 5) / math.sqrt(6)
    assert interval(values).stderr == pytest.approx(expected, rel=1e-12)


def test_holm_is_what_its_paper_says() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.7]) == [0.7]


def test_the_same_values_give_the_same_p() -> None:
    rng = np.random.default_rng(8)
    a, b = rng.normal(size=50), rng.normal(size=50)
    assert paired(a, b) == paired(a, b)
    assert paired(a, b).p == pytest.approx(paired(b, a).p)


def test_one_sentence_says_what_was_seen_and_what_could_have_been() -> None:
    rng = np.random.default_rng(9)
    skill = rng.random(400)
    a, b = rng.random(400) < skill, rng.random(400) < skill
    found = paired(a, b)
    said = sentence(found)
    assert said == f"no difference can be seen with 400 items; {items_for(found, 0.01):,} would show 1 point."
    better = sentence(paired(np.ones(60), np.r_[np.zeros(20), np.ones(40)]), "step 200", "step 100")
    assert better.startswith("step 200 is 33.3 points better than step 100 on 60 items (")
    assert better.endswith("p < 0.001).")
    worse = sentence(paired(np.full(40, 2.0) + rng.normal(0, 0.1, 40), np.ones(40)), higher_is_better=False)
    assert "worse than the other" in worse
    assert "same value for every one" in sentence(paired([0.5, 0.25], [0.5, 0.25]))
    assert "too few" in sentence(paired([0.5], [0.25]))
    # A difference that would pass alone does not when ten were tested.
    one = paired(np.ones(60), np.r_[np.zeros(7), np.ones(53)])
    assert one.p < 0.05
    assert "no difference" in sentence(one, p=min(1.0, one.p * 10))
