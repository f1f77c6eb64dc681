"""A save is due when it was asked for, or as often as is worth it: shown on failures that are simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from shoal.checkpoint.interval import Cadence, Seen, best_interval_s, expected_per_hour, held_interval_s, shown
from shoal.spec.run import Run

HOUR = 3600.0


def due_steps(cadence: Cadence, steps: int, step_s: float = 1.0, persist_s: float = 0.0) -> list[int]:
    """The steps after which a run saves; while a save is written the next one has to wait."""
    found, busy_until = [], 0.0
    for done in range(1, steps + 1):
        now = done * step_s
        if cadence.due(done, now) and now >= busy_until:
            cadence.begun(done, now)
            found.append(done)
            busy_until = now + persist_s
    return found


def test_steps_are_counted_from_the_beginning_of_the_run_whatever_it_resumed_from() -> None:
    assert due_steps(Cadence(10, 0, 0.0), 35) == [10, 20, 30]
    resumed = Cadence(10, 7, 0.0)
    assert [n for n in range(8, 25) if resumed.due(n, 0.0)][:1] == [10]
    assert due_steps(Cadence(0, 0, 0.0), 100) == []


def test_a_save_that_has_to_wait_for_the_one_before_is_made_late_and_not_left_out() -> None:
    assert due_steps(Cadence(10, 0, 0.0), 45, persist_s=12.0) == [10, 22, 34]


def test_a_time_is_kept_whatever_a_step_takes() -> None:
    assert due_steps(Cadence("30 s", 0, 0.0), 20, step_s=8.0) == [4, 8, 12, 16, 20]
    assert due_steps(Cadence("30 s", 0, 0.0), 100, step_s=1.0) == [30, 60, 90]


def test_nothing_is_saved_twice() -> None:
    cadence = Cadence("30 s", 5, 0.0)
    assert not cadence.due(5, 1000.0)
    assert cadence.due(6, 1000.0)


def test_what_is_to_be_kept_is_saved() -> None:
    spec: dict[str, Any] = {"name": "a", "data": {"train": "x", "eval": "y"}, "train": {"steps": 100}}
    checkpoint = {"every": "1 h", "keep_every": 40, "keep_best": 1}
    run = Run.model_validate({**spec, "eval": {"every": 30}, "checkpoint": checkpoint})
    assert due_steps(Cadence.of(run, 0, 0.0), 100) == [30, 40, 60, 80, 90]
    run = Run.model_validate({**spec, "eval": {"every": 30}, "checkpoint": {"every": "1 h"}})
    assert due_steps(Cadence.of(run, 0, 0.0), 100) == []


def test_auto_saves_after_a_minute_and_then_as_the_cost_says() -> None:
    cadence = Cadence("auto", 0, 0.0)
    assert not cadence.due(1, 59.0)
    assert cadence.due(1, 60.0)
    assert cadence.why(60.0) == "the first checkpoint after 60 s: what a save costs here is not known yet"
    cadence.begun(1, 60.0)
    cadence.saved(stall_s=0.04, suppressed_s=0.07, persist_s=3.0)
    assert cadence.why(60.0) == "a checkpoint every 138 s: a save costs 0.11 s and a failure is expected every 24 h"
    assert not cadence.due(2, 197.0)
    assert cadence.due(2, 199.0)


def test_the_interval_is_youngs_within_its_bounds() -> None:
    a_day = 1 / 24
    assert held_interval_s(1.0, a_day, 0.0) == best_interval_s(1.0, a_day) == math.sqrt(2 * 1.0 * 24 * HOUR)
    assert held_interval_s(0.0, a_day, 0.0) == 15
    assert held_interval_s(0.0, a_day, 40.0) == 40  # the disk writes no faster
    assert held_interval_s(80.0, a_day, 0.0) == 1800
    assert held_interval_s(300.0, a_day, 0.0) == 300 / 0.05  # every half hour, it would be a sixth of the time
    assert held_interval_s(1.0, a_day, 4000.0) == 4000


@pytest.mark.parametrize(
    ("cost_s", "persist_s", "says"),
    [
        (1e-4, 0.1, "every 15 s: a save costs 0.0001 s and a failure is expected every 24 h; less is not worth a save"),
        (
            0.1,
            400.0,
            "every 7 min: a save costs 0.1 s and a failure is expected every 24 h; one takes 7 min to be written",
        ),
        (
            60.0,
            9.0,
            "every 30 min: a save costs 60 s and a failure is expected every 24 h; more would put too much work",
        ),
    ],
)
def test_the_decision_says_which_bound_held_it(cost_s: float, persist_s: float, says: str) -> None:
    cadence = Cadence("auto", 0, 0.0)
    cadence.saved(cost_s, persist_s)
    assert says in cadence.why(0.0)


def test_what_was_asked_for_is_said_to_be() -> None:
    assert Cadence(50, 0, 0.0).why(0.0) == "a checkpoint every 50 steps, as asked"
    assert Cadence("10 min", 0, 0.0).why(0.0) == "a checkpoint every 10 min, as asked"
    assert Cadence(0, 0, 0.0).why(0.0) == "a checkpoint at the end only"
    assert [Cadence(every, 0, 0.0).automatic for every in (0, 50, "10 min", "auto")] == [False, False, False, True]


def test_one_slow_save_does_not_last_in_the_average() -> None:
    cadence = Cadence("auto", 0, 0.0)
    cadence.saved(stall_s=10.0, persist_s=1.0)
    slow = cadence.interval_s(0.0)
    for _ in range(12):
        cadence.saved(stall_s=0.1, persist_s=1.0)
    assert cadence.interval_s(0.0) < slow / 5


def test_the_rate_begins_at_that_of_others_and_ends_at_what_was_seen() -> None:
    assert 1 / Seen().per_hour(1) == pytest.approx(24, rel=0.001)
    assert 1 / Seen().per_hour(16_384) == pytest.approx(3.1, rel=0.15)  # of which Llama 3 405B saw one every 3.1 h
    assert 1 / Seen().per_hour(1, hours=24.0) == pytest.approx(72, rel=0.001)  # a day without one
    two_an_hour = Seen(failures=200, expected=100 * expected_per_hour(8))
    assert two_an_hour.per_hour(8) == pytest.approx(2.0, rel=0.15)


def journal(*facts: tuple[str, float, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"kind": kind, "t": t * HOUR, **fields} for kind, t, fields in facts]


def test_the_journal_tells_which_failures_cost_work_and_how_long_the_run_has_trained() -> None:
    killed, wrong = {"cause": "killed"}, {"cause": "user-error"}
    records = journal(
        ("attempt", 0.0, {}), ("start", 0.0, {"world": 8}), ("step", 1.0, {}), ("step", 2.0, {}),
        ("failure", 2.1, killed),
        ("attempt", 3.0, {}), ("start", 3.0, {"world": 8}), ("failure", 3.5, killed),  # no step, no work lost
        ("attempt", 4.0, {}), ("start", 4.0, {"world": 4}), ("step", 6.0, {}), ("close", 6.0, {}),  # told to stop
        ("attempt", 7.0, {}), ("failure", 7.1, killed),
        ("attempt", 8.0, {}), ("start", 8.0, {"world": 4}), ("step", 8.5, {}), ("failure", 9.0, wrong),
        ("attempt", 9.0, {}), ("start", 9.0, {"world": 4}), ("step", 9.5, {}),
        ("failure", 11.0, {"cause": "supervisor-lost"}),
    )  # fmt: skip
    seen = Seen.of(records)
    assert seen.failures == 2
    assert seen.expected == pytest.approx(2 * expected_per_hour(8) + 3 * expected_per_hour(4))


def test_a_journal_whose_clock_went_back_tells_no_negative_time() -> None:
    seen = Seen.of(journal(("start", 5.0, {"world": 1}), ("step", 6.0, {}), ("step", 2.0, {}), ("step", 6.5, {})))
    assert seen.expected == pytest.approx(1.5 * expected_per_hour(1))


def overhead(interval_s: Callable[[int, float], float], failures_at: list[float], cost_s: float) -> float:
    """The share of time that is not new work, from one failure to the next: saves, and what is done again.

    `interval_s` is asked with the failures so far and the time since the last one.
    """
    lost = 0.0
    for count, (before, after) in enumerate(pairwise([0.0, *failures_at])):
        at, life = 0.0, after - before
        while at + (period := interval_s(count, at) + cost_s) <= life:
            at += period
            lost += cost_s
        lost += life - at
    return lost / failures_at[-1]


def fixed(interval_s: float) -> Callable[[int, float], float]:
    return lambda failures, since_s: interval_s


def failures(mean_s: float, count: int, seed: int) -> list[float]:
    chance, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += chance.expovariate(1 / mean_s)
        found.append(at)
    return found


@pytest.mark.parametrize(("cost_s", "mean_h"), [(0.5, 1.0), (2.0, 8.0), (10.0, 3.0), (20.0, 24.0)])
def test_no_interval_of_a_grid_does_much_better_than_the_one_chosen(cost_s: float, mean_h: float) -> None:
    times = failures(mean_h * HOUR, 2000, seed=4)
    chosen_s = held_interval_s(cost_s, 1 / mean_h, persist_s=1.0)
    chosen = overhead(fixed(chosen_s), times, cost_s)
    best = min(overhead(fixed(chosen_s * f), times, cost_s) for f in (0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4))
    assert chosen < 1.03 * best
    # The closed form: C/T + T/2M.
    assert chosen == pytest.approx(cost_s / chosen_s + chosen_s / (2 * mean_h * HOUR), rel=0.06)


def test_a_run_that_fails_far_more_often_than_others_soon_saves_as_often_as_it_should() -> None:
    cost_s, mean_s, devices = 2.0, 1200.0, 8
    known_s = best_interval_s(cost_s, HOUR / mean_s)
    never_learns_s = held_interval_s(cost_s, Seen().per_hour(devices), persist_s=1.0)
    lost = {"knows": 0.0, "learns": 0.0, "never learns": 0.0}
    for seed in range(5):
        times = failures(mean_s, 60, seed)

        def learnt(count: int, since_s: float, times: list[float] = times) -> float:
            before = Seen(count, (times[count - 1] if count else 0.0) / HOUR * expected_per_hour(devices))
            cadence = Cadence("auto", 0, 0.0, devices, before)
            cadence.saved(cost_s, persist_s=1.0)
            return cadence.interval_s(since_s)

        lost["knows"] += overhead(fixed(known_s), times, cost_s) / 5
        lost["learns"] += overhead(learnt, times, cost_s) / 5
        lost["never learns"] += overhead(fixed(never_learns_s), times, cost_s) / 5
    assert lost["learns"] < lost["knows"] + 0.02, lost
    assert lost["never learns"] > lost["knows"] + 0.1, lost


def test_lengths_are_shown_as_a_person_says_them() -> None:
    assert [shown(s) for s in (0.004, 0.11, 3.26, 142.0, 299.0, 900.0, 93_600.0, 400_000.0)] == [
        "0.004 s", "0.11 s", "3.3 s", "142 s", "299 s", "15 min", "26 h", "5 days",
    ]  # fmt: skip
