"""Seeds of bad weather in which a swarm once stood still, forgot or disagreed; more of them by hand (`storms`)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from tests.swarm.storms import Storm


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(24, id="the leader has left out one who is back: it gives up its term"),
        pytest.param(37, id="so do most of those who are left, with new members in it"),
        pytest.param(56, id="the others have voted, and the leader has not"),
        pytest.param(62, id="what was agreed to leaves out most who are heard now"),
        pytest.param(33, id="all leave at once"),
        pytest.param(57, id="the leader is put out while others agree to its record"),
        pytest.param(16, id="the first of a few is put out where halves wait"),
        pytest.param(30073, id="what a few have agreed to, and nobody else will, was not decided"),
        pytest.param(50012, id="one was put out whom most who are left have agreed to"),
        pytest.param(70141, id="one is in a later term by votes of others who are gone, without its own"),
        pytest.param(20620, id="one has gone to a later term by votes that the others cannot hear"),
    ],
)
def test_where_most_hear_each_other_records_go_on_and_nothing_is_decided_twice(seed: int) -> None:
    storm = Storm(seed)
    storm.run()
    assert storm.owed > 0


def end_of(seed: int) -> str:
    """All that happened has left its mark on the generator of chances."""
    storm = Storm(seed)
    storm.run()
    return hashlib.sha256(repr(storm.rng.getstate()).encode()).hexdigest()


def test_a_seed_means_the_same_whatever_order_sets_have() -> None:
    words = [sys.executable, "-c", "from tests.swarm.test_storms import end_of; print(end_of(9))"]
    there = subprocess.run(
        words, env={**os.environ, "PYTHONHASHSEED": "27"}, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == end_of(9)
