"""The crash campaign, a part of it: `benchmarks/crash.py` runs all of it and prints a table."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.checkpoint.crashes import (
    ALL,
    AT_ONCE,
    BACKGROUND,
    EACH,
    MACHINE,
    ONE,
    Case,
    cases,
    cases_on_s3,
    judged,
    storm,
)

from shoal.checkpoint import fault_points

# One of each kind, drawn anew when the cases change; and the moment that needs most care: nobody has been told yet.
KINDS = [(BACKGROUND, ONE), (BACKGROUND, EACH), (BACKGROUND, ALL), (BACKGROUND, MACHINE), (AT_ONCE, ONE)]
DRAWN = [random.Random(i).choice([c for c in cases() if (c.way, c.who) == kind]) for i, kind in enumerate(KINDS)]
CHOSEN = Case("published", 0, BACKGROUND, ONE)
ON_S3 = [c for who in (ONE, MACHINE) for c in random.Random(0).sample([c for c in cases_on_s3() if c.who == who], 3)]


def test_the_campaign_knows_every_point() -> None:
    assert {case.point for case in cases()} == set(fault_points.POINTS) - {"step"}  # that one is no part of a save


@pytest.mark.parametrize("case", [*DRAWN, CHOSEN], ids=str)
def test_killed_at_a_point_of_a_save_the_next_start_loses_nothing_that_was_published(
    case: Case, tmp_path: Path
) -> None:
    verdict = judged(case, tmp_path)
    assert verdict.good, verdict.wrong


def test_killed_at_random_moments_again_and_again_nothing_that_was_published_is_lost(tmp_path: Path) -> None:
    for verdict in storm(4, tmp_path, lives=4):
        assert verdict.good, verdict


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_storm(seed: int, tmp_path: Path) -> None:
    for verdict in storm(seed, tmp_path, lives=20):
        assert verdict.good, verdict


@pytest.mark.cluster
@pytest.mark.parametrize("case", ON_S3, ids=str)
def test_killed_at_a_point_of_a_save_to_s3_the_next_start_loses_nothing_that_was_published(
    case: Case, tmp_path: Path, s3: str
) -> None:
    verdict = judged(case, tmp_path, bucket=s3)
    assert verdict.good, verdict.wrong
