"""What is kept is what was asked for, and whatever is asked for, the newest good checkpoint is never deleted."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from shoal.checkpoint.retain import Candidate, deletable, keepers

LOSSES = st.none() | st.floats(0, 10) | st.sampled_from([math.nan, math.inf, 1.0])
CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(0, 40), st.integers(1, 3), LOSSES),
    max_size=12,
    unique_by=lambda c: (c.step, c.term),
)
COUNTS = st.integers(-1, 13)


def steps(candidates: set[Candidate]) -> list[int]:
    return sorted(c.step for c in candidates)


def test_the_newest_the_milestones_and_the_best_stay() -> None:
    losses = {10: 3.0, 20: 2.5, 30: 1.5, 40: 1.6, 50: math.nan, 60: 1.5, 70: 1.9, 80: None}
    candidates = [Candidate(step, 1, loss) for step, loss in losses.items()]
    assert steps(keepers(candidates, keep=2)) == [70, 80]
    assert steps(keepers(candidates, keep=1, keep_every=40)) == [40, 80]
    assert steps(keepers(candidates, keep=1, keep_best=1)) == [60, 80]  # of two that are equally good, the newer
    assert steps(keepers(candidates, keep=1, keep_every=20, keep_best=2)) == [20, 30, 40, 60, 80]


def test_the_state_before_the_first_step_is_no_milestone() -> None:
    assert steps(keepers([Candidate(0, 1), Candidate(5, 1)], keep=1, keep_every=5)) == [5]


def test_a_later_term_is_newer_at_the_same_step() -> None:
    assert keepers([Candidate(5, 2), Candidate(5, 1)], keep=1) == {Candidate(5, 2)}


def test_a_damaged_newest_one_does_not_cost_the_good_one_before_it() -> None:
    candidates = [Candidate(100, 1), Candidate(120, 1), Candidate(150, 1), Candidate(160, 1)]
    kept = {"keep": 1, "keep_every": 100}
    assert deletable(candidates, **kept, verified=lambda c: True) == [Candidate(120, 1), Candidate(150, 1)]
    assert deletable(candidates, **kept, verified=lambda c: c.step != 160) == [Candidate(120, 1)]
    assert deletable(candidates, **kept, verified=lambda c: c.step == 100) == []
    assert deletable(candidates, **kept, verified=lambda c: False) == []


@given(CANDIDATES, COUNTS, COUNTS, COUNTS, st.sets(st.integers(0, 12)))
@example([Candidate(100, 1), Candidate(150, 1), Candidate(160, 1)], 1, 100, 0, {0, 1})
def test_the_newest_good_one_is_never_deleted(
    candidates: list[Candidate], keep: int, every: int, best: int, good_places: set[int]
) -> None:
    good = {c for i, c in enumerate(candidates) if i in good_places}
    gone = deletable(candidates, keep, every, best, verified=good.__contains__)
    left = set(candidates) - set(gone)
    assert not good or max(good) in left
    assert not gone or good
    assert keepers(candidates, keep, every, best) <= left
    # Twice is the same as once: no checkpoint goes only because others have gone.
    assert deletable(left, keep, every, best, verified=good.__contains__) == []


@given(CANDIDATES, COUNTS, COUNTS, COUNTS)
def test_pruning_after_every_save_keeps_what_one_look_at_all_of_them_would(
    candidates: list[Candidate], keep: int, every: int, best: int
) -> None:
    there: set[Candidate] = set()
    for saved in sorted(candidates):
        there.add(saved)
        there -= set(deletable(there, keep, every, best, verified=lambda c: True))
    assert there == keepers(candidates, keep, every, best)


@given(CANDIDATES)
def test_a_healthy_run_verifies_one_checkpoint_to_delete_many(candidates: list[Candidate]) -> None:
    asked: list[Candidate] = []

    def verified(candidate: Candidate) -> bool:
        asked.append(candidate)
        return True

    deletable(candidates, 1, verified=verified)
    assert asked == sorted(candidates)[-1:]
