"""The order of the data: a permutation an epoch, exact shares in a mixture, the same for ever."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.data.mixture import quotas
from shoal.data.order import Order
from shoal.errors import SpecError

SIZES = st.one_of(
    st.integers(1, 3000),
    st.sampled_from([2, 3, 4, 5, 7, 97, 1009, 2003, 8191]),  # primes
    st.integers(0, 12).map(lambda k: 2**k),
    st.integers(1, 55).map(lambda k: k * k + 1),  # one past a square: the most values outside
)


@settings(max_examples=200, deadline=None)
@given(n=SIZES, seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**9))
@example(n=1, seed=0, epoch=0)
@example(n=2, seed=0, epoch=1)
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    sources, windows = Order([n], [1.0], seed).at(epoch * n, n)
    assert sorted(windows.tolist()) == list(range(n))
    assert not sources.any()


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(2**40, 2**61), seed=st.integers(0, 2**63 - 1), start=st.integers(0, 2**61), count=st.integers(1, 500)
)
def test_in_huge_data_sets_nothing_repeats_or_leaves_the_range(n: int, seed: int, start: int, count: int) -> None:
    start = min(start % n, n - count)  # within one epoch
    _, windows = Order([n], [1.0], seed).at(start, count)
    assert len(set(windows.tolist())) == count
    assert 0 <= windows.min() <= windows.max() < n


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    seed=st.integers(0, 2**63 - 1),
    start=st.integers(0, 10**12),
    cuts=st.lists(st.integers(0, 70), min_size=1, max_size=12),
)
def test_reading_in_any_portions_gives_the_same_sequence(
    sizes: list[int], seed: int, start: int, cuts: list[int]
) -> None:
    order = Order(sizes, [1.0 + k for k in range(len(sizes))], seed)
    whole = order.at(start, sum(cuts))
    at, parts = start, []
    for count in cuts:
        parts.append(order.at(at, count))
        at += count
    for i in (0, 1):
        assert whole[i].tolist() == np.concatenate([p[i] for p in parts]).tolist()


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=6),
    seed=st.integers(0, 2**32),
    first_block=st.integers(0, 10**9),
)
def test_shares_of_a_mixture_are_exact_in_every_block_and_no_sample_is_skipped(
    weights: list[float], seed: int, first_block: int
) -> None:
    sizes = [700 * (k + 1) for k in range(len(weights))]
    order = Order(sizes, weights, seed)
    block, counts = order.quotas.block, order.quotas.counts
    total = sum(Fraction(w) for w in weights)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - Fraction(weight) / total * block) < 1
    if block > 10_000:
        return
    blocks = 2
    sources, windows = order.at(first_block * block, blocks * block)
    assert np.bincount(sources, minlength=len(weights)).tolist() == [blocks * c for c in counts]
    for k, n in enumerate(sizes):
        # Every source goes on where it was: these samples of its own epochs, each exactly once.
        alone = _alone(order, k, first_block * counts[k], blocks * counts[k])
        assert Counter(alone) == Counter(windows[sources == k].tolist()), n


def _alone(order: Order, k: int, start: int, count: int) -> list[int]:
    """Samples of source k by its own count: the permutation of a one-source order that is given this source's key."""
    single = Order([order.sizes[k]], [1.0], order.seed)
    single._keys = order._keys[k : k + 1]
    return single.at(start, count)[1].tolist()


def test_one_sample_in_a_thousand_is_exact_in_the_smallest_block() -> None:
    assert quotas([0.999, 0.001]).block == 1000
    assert quotas([0.999, 0.001]).counts == (999, 1)
    assert quotas([1, 1, 1]).counts == (334, 333, 333)


def test_small_weights_get_a_larger_block_and_too_small_ones_are_refused() -> None:
    assert quotas([1.0, 0.00015]).block > 1000
    assert quotas([1.0, 1e-6]).counts[1] == 1
    with pytest.raises(SpecError, match=r"source 2 of the mixture has weight 1e-08, less than one sample in 1,000,000"):
        Order([10, 10], [1.0, 1e-8], 0)
    with pytest.raises(SpecError, match="above zero"):
        Order([10, 10], [1.0, 0.0], 0)


def test_a_source_without_windows_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one window"):
        Order([10, 0], [1.0, 1.0], 0)


def test_seeds_epochs_and_sources_are_shuffled_differently() -> None:
    n = 1000
    first = Order([n], [1.0], 0).at(0, n)[1]
    others = {
        "seed": Order([n], [1.0], 1).at(0, n)[1],
        "epoch": Order([n], [1.0], 0).at(n, n)[1],
        "last epoch": Order([n], [1.0], 0).at(n * 10**9, n)[1],
    }
    mixture = Order([n, n], [1.0, 1.0], 0)
    sources, windows = mixture.at(0, 2 * n)
    others["source"] = windows[sources == 1]
    assert not np.array_equal(windows[sources == 0], windows[sources == 1])
    for what, other in others.items():
        # Two unrelated shuffles agree in one place on average.
        assert int((first == other).sum()) < 10, what


def test_all_shuffles_of_four_windows_are_about_equally_likely() -> None:
    counts = Counter(tuple(Order([4], [1.0], seed).at(0, 4)[1].tolist()) for seed in range(2400))
    assert len(counts) == 24
    assert _chi2([*counts.values()]) < 60  # 23 degrees of freedom: 1 in 30,000 seeds of this test would fail


@pytest.mark.parametrize("n", [100, 1000, 1 << 14])
def test_places_and_neighbours_look_random(n: int) -> None:
    pairs = np.array([Order([n], [1.0], seed).at(n // 3, 2)[1] for seed in range(2000)])
    bins = 50
    assert _chi2(np.bincount(pairs[:, 0] * bins // n, minlength=bins)) < 110  # 49 degrees of freedom
    assert _chi2(np.bincount((pairs[:, 1] - pairs[:, 0]) % n * bins // n, minlength=bins)) < 110
    _, windows = Order([n], [1.0], 9).at(0, n)
    assert abs(np.corrcoef(windows[:-1], windows[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(np.arange(n), windows)[0, 1]) < 5 / np.sqrt(n)


def _chi2(counts) -> float:
    counts = np.asarray(counts, float)
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


@pytest.mark.parametrize(
    "order",
    [
        Order([10**9 + 7], [1.0], 1),
        Order([1 << 48], [1.0], 1),
        Order([10**8, 10**7, 10**6, 12_345], [0.6, 0.3, 0.09, 0.01], 1),
    ],
    ids=["one source", "2^48 windows", "mixture"],
)
def test_seeking_to_step_one_billion_takes_under_a_millisecond(order: Order) -> None:
    batch = 64
    times = []
    for i in range(101):
        began = time.process_time()
        order.at((10**9 + 7 * i) * batch, batch)
        times.append(time.process_time() - began)
    assert statistics.quantiles(times, n=4)[0] < 1e-3  # the better quarter: others may be on the machine


GOLDEN = [
    (([1000], [1.0], 0), 0, [0] * 8, [468, 933, 626, 897, 748, 327, 243, 115]),
    (([1000], [1.0], 0), 999, [0] * 3, [989, 390, 534]),
    (([1000], [1.0], 7), 64 * 10**9, [0] * 8, [521, 451, 365, 834, 513, 502, 919, 685]),
    (([2**48 + 1], [1.0], 2**62 + 11), 10**15, [0] * 3, [139123126560568, 235880622322646, 239609704522233]),
    (
        ([10**6, 500, 3], [0.7, 0.2, 0.1], 3),
        0,
        [2, 2, 0, 1, 1, 2, 1, 0, 0, 0, 0, 0],
        [2, 2, 849225, 74, 142, 0, 419, 812688, 217804, 956994, 269199, 773112],
    ),
    (
        ([10**6, 500, 3], [0.7, 0.2, 0.1], 3),
        64 * 10**9,
        [0, 2, 0, 0, 0, 0, 0, 2, 1, 0, 2, 0],
        [875470, 1, 19405, 617458, 477429, 534637, 626915, 0, 280, 292834, 1, 163958],
    ),
]


@pytest.mark.parametrize(("arguments", "position", "sources", "windows"), GOLDEN)
def test_the_order_never_changes_between_versions(arguments, position: int, sources, windows) -> None:
    """If this fails, a run resumed by this version would read other data than it should. Never edit the numbers."""
    got = Order(*arguments).at(position, len(windows))
    assert got[0].tolist() == sources
    assert got[1].tolist() == windows
