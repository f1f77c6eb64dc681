"""Healthy runs of all kinds are never taken for hung, and broken ones soon are: generated traces in virtual time.

`benchmarks/hang.py --traces` prints the table over thousands of them; here are a few of each kind.
"""

from __future__ import annotations

import math

import pytest
from tests.guard.traces import FAULTS, Fault, Span, Trace, broken, healthy, play

from shoal.journal.beat import DECAY, Marks

MOST_S = 40.0  # a step; the benchmark goes to half an hour
SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_run_is_never_taken_for_hung(seed: int) -> None:
    outcome = play(healthy(seed, most_s=MOST_S))
    assert outcome.killed is None, f"{outcome.trace.about}: {outcome.killed.evidence}"
    assert outcome.group.over


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "live-lock"])
def test_a_broken_rank_is_named_within_ten_seconds_or_three_steps(fault: Fault) -> None:
    for seed in SEEDS:
        outcome = play(broken(seed, fault, most_s=MOST_S))
        assert outcome.right, f"{outcome.trace.about}: {outcome.killed and outcome.killed.evidence}"
        assert outcome.after_s <= outcome.bar_s, outcome.trace.about


def test_a_rank_that_computes_for_ever_is_told_and_not_taken_for_hung() -> None:
    for seed in SEEDS:
        outcome = play(broken(seed, "live-lock", most_s=MOST_S))
        assert outcome.killed is None, f"{outcome.trace.about}: {outcome.killed.evidence}"
        assert outcome.group.victim in {slow.rank for slow in outcome.slow}, outcome.trace.about


def test_the_case_of_the_issue_is_healthy() -> None:
    """43 s a step, one process, one micro-batch: it was ended in step 3, which has no step before it to go by."""
    trace = Trace(seed=1, step_s=43.0, micro_batches=1, world=1, gpu=False, share=1.0, steps=6)
    outcome = play(trace)
    assert outcome.killed is None
    assert outcome.group.over
    assert not [
        slow.evidence for slow in outcome.slow if slow.step <= 3
    ]  # nor is it told of: nobody knows what is slow


def test_a_phase_has_the_long_limit_until_it_was_measured_and_then_one_by_its_own_history() -> None:
    """Steps are short; evaluations take a minute in which nothing is seen to happen."""
    spans: list[Span] = []
    for step, evaluation_s in enumerate((0.0, 0.0, 0.0, 0.0, 60.0, 0.0, 70.0, 0.0, math.inf)):
        spans += [Span("data", 0.05, step=step), Span("forward", 0.1), Span("record", 0.01)]
        if evaluation_s:
            spans.append(Span("evaluate", evaluation_s, "asleep", broken=evaluation_s == math.inf))
    trace = Trace(seed=0, step_s=0.15, micro_batches=1, world=1, gpu=False, share=1.0, steps=9, fault="asleep")
    outcome = play(trace, [spans])
    assert outcome.right
    assert 2.5 * 70 <= outcome.after_s <= outcome.bar_s


def test_the_length_of_a_step_is_not_known_before_the_third_one_is_over() -> None:
    marks = Marks(0.0)
    for step in range(4):
        marks.mark("data", step, 100.0 * step)
        marks.mark("forward", None, 100.0 * step + 1)
        beat = marks.beat(1)
        known = step == 3
        assert bool(beat.slowest_s) == known
        assert bool(beat.longest_s["forward"]) == known
    assert beat.slowest_s == 100.0
    assert (beat.longest_s["data"], beat.longest_s["forward"], beat.longest_s["clip"]) == (1.0, 99.0, 0.0)


def test_a_phase_is_remembered_by_its_longest_stay_however_many_micro_batches_follow() -> None:
    marks, now = Marks(0.0), 0.0
    for step, longest_s in enumerate((1.0, 1.0, 8.0, 1.0, 1.0)):
        for i in range(512):
            marks.mark("forward", step if i == 0 else None, now)
            now += longest_s if i == 0 else 0.01
        marks.mark("evaluate", None, now)
        now += 60.0 if step == 2 else 0.0
    longest = marks.beat(1).longest_s
    assert longest["forward"] == pytest.approx(8.0 * DECAY)
    assert longest["evaluate"] == pytest.approx(60.0 * DECAY)
