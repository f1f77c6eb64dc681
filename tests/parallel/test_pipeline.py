"""A pipeline computes what one process computes, in every schedule."""

from __future__ import annotations

import pytest

from shoal.spec.mesh import Sizes
from tests.parallel.pipelines import Case, alone, assert_same_curve, piped, tiny
from tests.ranks import run_ranks

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zbv"]


def check(case: Case, world: int) -> None:
    expected = alone(case)
    curves = [curve for curve, _ in run_ranks(piped, world, case, timeout_s=100)]
    assert_same_curve(curves, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_match_one(schedule: str) -> None:
    check(Case(schedule, Sizes(pp=2), tiny(layers=5)), 2)
