"""Goodput: the exact expression is what a simulation finds, its limits are the known ones, published figures fit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
from benchmarks.goodput import DECOUPLED, RARE, decoupled, goodput_rows, mttf_rows

from shoal.checkpoint.interval import best_interval_s as interval_of_auto
from shoal.checkpoint.interval import expected_per_hour
from shoal.errors import SpecError
from shoal.plan.failures import DEFAULT, NEVER, PRESETS, FailureRate, Term, measured, preset, stated
from shoal.plan.goodput import Goodput, best_spares, goodput, short_of_nodes
from shoal.plan.renewal import best_interval_s, cycle, daly_interval_s, few_failures, young_interval_s
from shoal.plan.restarts import STYLES, Span, Style, style
from shoal.spec.run import Plan


def of(devices: int = 16_384, how: str = "supervised", rate: str = "llama3", **more: float) -> Goodput:
    return goodput(devices, 8, preset(rate), style(how), 30.0, 5.0, step_s=10.0, **more)  # type: ignore[arg-type]


def exactly(detect: float, restart: float) -> Style:
    """One that is known to the second."""
    spans = {"detect": detect, "restart": restart, "load": 0.0, "replace": 0.0}
    return replace(style("supervised"), replace_share=0.0, **{k: Span(v, v, v, "") for k, v in spans.items()})


def simulated(
    rate: float, work: float, block: float, late: float, detect: float, downs: list[tuple[float, float]], seed: int
) -> float:
    """Plays the run: works, stops for saves that are safe only later, fails whenever it happens, comes back."""
    chance = random.Random(seed)
    clock = useful = 0.0
    for _ in range(25_000):
        fails = chance.expovariate(rate)
        safe_at = work + block + late  # the first save of this life
        while safe_at < fails:
            useful += work
            safe_at += work + block
        clock += fails
        while True:  # tries to come back until no failure meets one
            clock += detect
            down = downs[chance.random() > downs[0][0]][1]
            again = chance.expovariate(rate)
            clock += min(down, again)
            if again > down:
                break
    return useful / clock


@pytest.mark.parametrize(
    ("rate", "work", "block", "late", "detect", "downs"),
    [
        (1 / 3600, 300, 10, 60, 30, [(1.0, 200.0)]),
        (1 / 900, 200, 5, 100, 60, [(0.75, 75.0), (0.25, 675.0)]),
        (1 / 600, 400, 40, 0, 0, [(1.0, 900.0)]),  # where the closed form is below zero
    ],
)
def test_the_exact_expression_is_what_a_simulation_finds(
    rate: float, work: float, block: float, late: float, detect: float, downs: list[tuple[float, float]]
) -> None:
    exact = cycle(rate, work, block, late, detect, downs)
    found = simulated(rate, work, block, late, detect, downs, seed=1)
    assert exact.training == pytest.approx(found, rel=0.01)
    assert sum(vars(exact).values()) == pytest.approx(1)


def test_for_few_failures_the_exact_expression_is_the_closed_form() -> None:
    for rate in (1e-7, 1e-6, 1e-5):
        exact = cycle(rate, 1000, 10, 0, 60, [(1.0, 540.0)]).training
        assert exact == pytest.approx(few_failures(rate, 600, 1000, 10), abs=2 * rate**2 * 1600**2 + rate * 20)
    assert few_failures(1 / 600, 900, 400, 40) < 0 < cycle(1 / 600, 400, 40, 0, 0, [(1.0, 900.0)]).training


@pytest.mark.parametrize(("cost", "mttf"), [(0.1, 1e5), (10, 11_000), (60, 800), (60, 30)])
def test_no_other_interval_is_better_and_young_and_daly_are_near_it_where_saves_are_short(
    cost: float, mttf: float
) -> None:
    def training(work: float) -> float:
        return cycle(1 / mttf, work, cost, 0, 0, [(1.0, 0.0)]).training

    best = best_interval_s(cost, mttf)
    assert all(training(best) > training(best * other) for other in (0.9, 1.1))
    if cost < mttf / 1000:
        assert best == pytest.approx(young_interval_s(cost, mttf), rel=0.02)
        assert best == pytest.approx(daly_interval_s(cost, mttf), rel=0.001)


def test_islands_are_what_a_simulation_finds() -> None:
    """16 islands: each fails, is missed by the others, who wait until then, is away, comes back."""
    chance, islands, rate, detect, away, end = random.Random(2), 16, 1 / 20_000, 300.0, 1000.0, 3e7
    device = Term.known(islands * rate * 3600 / 1024, 1e6)
    fails = FailureRate("x", NEVER, device, "", "", "")
    planned = goodput(1024, 8, fails, replace(exactly(detect, away), islands=islands), 0.0, 0.0).expected
    changes: list[tuple[float, int, int]] = []  # when, islands more, reasons to wait more
    for _ in range(islands):
        clock = 0.0
        while (clock := clock + chance.expovariate(rate)) < end:
            changes += [(clock, -1, 1), (clock + detect, 0, -1)]
            clock += detect
            while (again := chance.expovariate(rate)) < away:  # fails while it comes back
                clock += again + detect
            clock += away
            changes.append((clock, 1, 0))
    done, before, up, waits = 0.0, 0.0, islands, 0
    for when, more, wait in sorted(changes):
        done += (when - before) * up * (waits == 0)
        before, up, waits = when, up + more, waits + wait
    assert planned == pytest.approx(done / islands / before, rel=0.005)


def test_more_failures_longer_restarts_and_dearer_saves_never_raise_goodput() -> None:
    for how in ("manual", "remote", "supervised", "spares", "islands"):
        sizes = [of(n, how).expected for n in (1024, 4096, 16_384, 65_536, 131_072)]
        if how != "spares":  # whole machines stand by: with few devices one of them is much
            assert sizes == sorted(sizes, reverse=True), how
        base = style(how)
        for name in ("detect", "restart", "load"):
            span = getattr(base, name)
            longer = replace(base, **{name: Span(2 * span.s, span.low_s, 2 * span.high_s, "")})
            assert goodput(16_384, 8, preset("llama3"), longer, 30.0, 5.0).expected < of(how=how).expected
    costs = [goodput(16_384, 8, DEFAULT, style("remote"), 60.0, b).expected for b in (0.0, 1.0, 10.0, 60.0)]
    assert costs == sorted(costs, reverse=True)
    safe = [goodput(16_384, 8, DEFAULT, style("remote"), w, 1.0).expected for w in (1.0, 60.0, 600.0)]
    assert safe == sorted(safe, reverse=True)


def test_islands_beat_restarts_and_more_so_on_more_devices() -> None:
    gains = [of(n, "islands").expected - of(n, "supervised").expected for n in (1024, 16_384, 131_072)]
    assert gains == sorted(gains)
    assert gains[0] > 0


def test_the_parts_are_all_of_the_time_and_the_interval_is_an_interval() -> None:
    for how in STYLES:
        for rate in PRESETS:
            found = of(how=how, rate=rate, maintenance=0.02, stragglers=0.03)
            assert sum(found.parts.values()) == pytest.approx(1)
            assert found.parts["training"] == found.expected
            assert 0 <= found.low <= found.expected <= found.high <= 1
    without, planned = of(), of(maintenance=0.02, stragglers=0.03)
    assert planned.expected == pytest.approx(without.expected * 0.98 * 0.97)


def test_the_interval_is_as_wide_as_what_is_not_known() -> None:
    sure = FailureRate("sure", Term.known(0.1, 1e12), NEVER, "", "", "")
    known = goodput(64, 8, sure, exactly(10, 300), 30.0, 5.0)
    assert known.low == pytest.approx(known.expected, abs=1e-5) == known.high
    vague = replace(exactly(10, 300), restart=Span(300, 100, 900, ""))
    found = goodput(64, 8, sure, vague, 30.0, 5.0)
    for bound, restart in ((found.low, 900.0), (found.high, 100.0)):
        alone = goodput(64, 8, sure, exactly(10, restart), 30.0, 5.0, found.interval_s).expected
        assert bound == pytest.approx(alone, abs=1e-5)
    rate_too = goodput(64, 8, replace(sure, job=Term.known(0.1, 5)), vague, 30.0, 5.0)
    assert rate_too.low < found.low < found.high < rate_too.high


def test_what_counts_most_is_named() -> None:
    assert "starting processes again counts most (480 s)" in of(131_072, "remote", "meta-rsc-1").advice
    assert "the work between two checkpoints" in of(interval=7200.0).advice
    assert "no single cost" in goodput(8, 8, preset("meta-rsc-1"), style("supervised"), 1.0, 0.1).advice


def test_published_figures_lie_within_the_intervals() -> None:
    rows = [*mttf_rows(), *goodput_rows()]
    assert [row.name for row in rows if row.held and not row.inside] == []
    assert all(row.inside is False for row in rows if not row.held), "what is said not to fit fits"
    away = [abs(p - f) for m in DECOUPLED for p, f in zip(DECOUPLED[m], decoupled()[m], strict=True) if p >= RARE]
    assert max(away) < 0.04


def test_a_rate_is_as_sure_as_its_count() -> None:
    few, many = (measured(n, n * 1e5, 10 * n, n * 1e3) for n in (2, 200))
    for devices in (8, 16_384):
        low, high = few.between(devices)
        assert low < many.between(devices)[0] < many.per_hour(devices) < many.between(devices)[1] < high
    chance = random.Random(3)
    drawn = sorted(chance.gammavariate(10.5, 1 / 1e5) for _ in range(20_000))
    sure = measured(10, 1e5, 0, 1e12)
    assert sure.between(1) == pytest.approx((drawn[1000], drawn[19_000]), rel=0.03)
    assert measured(0, 1e6).job == DEFAULT.job
    assert 0 < measured(0, 1e6).device.per_hour < 1e-6


def test_checkpoints_and_the_plan_expect_the_same_failures() -> None:
    """`checkpoint.every: auto` has the numbers of the default in a place of its own."""
    for devices in (1, 64, 16_384):
        assert expected_per_hour(devices) == pytest.approx(DEFAULT.per_hour(devices))
    assert interval_of_auto(2.0, 0.5) == pytest.approx(young_interval_s(2.0, 7200.0))


def test_spares_are_as_many_as_pay() -> None:
    spares = best_spares(2048, 5.0)
    kept = {n: (1 - short_of_nodes(n, 5.0)) * 2048 / (2048 + n) for n in range(40)}
    assert spares == max(kept, key=lambda n: kept[n])
    assert of(how="spares").spare_nodes > of(1024, "spares").spare_nodes > 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("mine"), "no failure rate 'mine'; use one of default, meta-rsc-1"),
        (lambda: style("magic"), "no restart style 'magic'; use one of manual, remote"),
        (lambda: of(64, "islands"), "64 devices are not enough for 16 islands"),
        (lambda: goodput(8, 8, DEFAULT, style("remote"), 1.0, 2.0), "cannot block training for longer"),
        (lambda: of(interval=0.0), "has to be above 0"),
        (lambda: measured(-1, 10), "negative"),
    ],
)
def test_wrong_inputs_are_one_sentence(call: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        call()  # type: ignore[operator]


def test_the_run_file_takes_the_styles_that_there_are_and_a_rate_in_the_usual_unit() -> None:
    named = get_args(get_args(Plan.model_fields["style"].annotation)[0])
    assert set(named) == set(STYLES)
    assert style("islands", 4).islands == 4
    assert style("supervised", 4).islands == 1
    assert stated(6.5 / 8).device.per_hour == pytest.approx(preset("meta-rsc-1").device.per_hour)
