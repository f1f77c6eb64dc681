"""Which epoch follows another. The members only say what they know; here is every kind of thing they can say."""

from __future__ import annotations

import pytest

from shoal.islands.epoch import Card, Epoch
from shoal.islands.succession import State, succeed

A, B, C, D = "0-aa", "1-bb", "2-cc", "3-dd"
SILENT = ("was silent for 4 s", 17.0)
LEFT = ("left", 17.0)


def card(key: str) -> Card:
    island = int(key[0])
    return Card(key, island, f"127.0.0.1:{4000 + island}", (f"127.0.0.1:{4000 + island}",), "here", 100 + island)


def epoch(*keys: str, base: int = 5) -> Epoch:
    return Epoch(7, tuple(map(card, keys)), base, life=3)


def computing(applied: int, *have: int) -> State:
    return State(applied, applied, list(have), behind=False)


def holding(applied: int, *have: int) -> State:
    return State(applied, applied + 1, list(have), behind=False)


def receiving(applied: int) -> State:
    return State(applied, applied, [], behind=True)


def after(
    before: Epoch,
    states: dict[str, State],
    gone: dict[str, tuple[str, float]] | None = None,
    ready: dict[str, Card] | None = None,
) -> Epoch:
    return succeed(before, states, gone or {}, ready or {}, next(iter(states)), 1234.5)


def test_who_is_gone_is_left_out_and_the_rest_keep_their_order() -> None:
    found = after(epoch(A, B, C, D), {D: computing(5), A: computing(5), C: computing(5)}, {B: SILENT})
    assert found.keys == [A, C, D]
    assert found.left == {B: "was silent for 4 s"}
    assert found.joined == ()
    assert (found.number, found.life, found.by, found.noticed) == (8, 3, D, 1234.5)


def test_who_did_not_answer_is_left_out_with_that_reason() -> None:
    found = after(epoch(A, B), {A: computing(5)})
    assert (found.keys, found.left) == ([A], {B: "does not answer"})


def test_a_step_that_somebody_has_applied_is_decided() -> None:
    """It heard COMMIT, so all hold it; that of the others was lost with the one who said it."""
    found = after(epoch(A, B, C), {B: computing(6), C: holding(5, 2, 3)}, {A: SILENT})
    assert found.base == 6
    assert found.have == {}  # what C has is of the step that is decided


def test_what_is_computed_of_the_step_after_a_decided_one_is_kept() -> None:
    found = after(epoch(A, B, C), {B: computing(6, 4, 5), C: holding(5, 2, 3)}, {A: SILENT})
    assert (found.base, found.have) == (6, {B: [4, 5]})


def test_a_step_that_all_hold_is_decided() -> None:
    """Who is lost may have applied it."""
    found = after(epoch(A, B, C), {B: holding(5, 2), C: holding(5, 3)}, {A: SILENT})
    assert (found.base, found.have) == (6, {})


def test_a_step_that_only_some_hold_is_open_and_what_was_computed_is_kept() -> None:
    """Nobody has applied it: that needs the HOLD of all."""
    found = after(epoch(A, B, C), {B: holding(5, 2, 3), C: computing(5, 4, 5)}, {A: SILENT})
    assert (found.base, found.have) == (5, {B: [2, 3], C: [4, 5]})


def test_what_a_member_that_leaves_has_computed_is_not_counted_on() -> None:
    found = after(epoch(A, B, C), {A: computing(5, 0, 1), B: computing(5, 2, 3), C: computing(5)}, {B: LEFT})
    assert (found.keys, found.have, found.left) == ([A, C], {A: [0, 1]}, {B: "left"})


def test_a_member_that_leaves_still_says_what_was_decided() -> None:
    found = after(epoch(A, B), {A: holding(5), B: computing(6)}, {B: LEFT})
    assert (found.keys, found.base) == ([A], 6)


@pytest.mark.parametrize("applied", [0, 3, 5])
def test_a_member_that_is_behind_decides_nothing_and_stays(applied: int) -> None:
    states = {B: holding(5, 2), C: holding(5, 3), D: receiving(applied)}
    found = after(epoch(A, B, C, D), states, {A: SILENT})
    assert (found.base, found.keys) == (6, [B, C, D])
    states = {B: holding(5, 2), C: computing(5, 3), D: receiving(applied)}
    found = after(epoch(A, B, C, D), states, {A: SILENT})
    assert (found.base, found.keys, found.have) == (5, [B, C, D], {B: [2], C: [3]})


def test_newcomers_are_taken_in_last() -> None:
    found = after(epoch(A, B), {A: computing(5, 0), B: computing(5, 1)}, ready={D: card(D), C: card(C)})
    assert (found.keys, found.joined, found.left) == ([A, B, D, C], (D, C), {})
    assert (found.base, found.have) == (5, {A: [0], B: [1]})


def test_one_comes_while_another_goes() -> None:
    found = after(epoch(A, B), {B: computing(5)}, {A: SILENT}, {C: card(C)})
    assert (found.keys, found.joined, found.left) == ([B, C], (C,), {A: "was silent for 4 s"})


def test_a_newcomer_that_is_a_member_already_is_none() -> None:
    """It says that it is ready until it hears of its epoch."""
    found = after(epoch(A, B), {A: computing(5), B: receiving(5)}, ready={B: card(B)})
    assert (found.keys, found.joined) == ([A, B], ())


def test_who_comes_back_is_another_one() -> None:
    again = card("1-ee")
    found = after(epoch(A, B), {A: computing(5)}, {B: SILENT}, {again.key: again})
    assert (found.keys, found.joined, found.left) == ([A, "1-ee"], ("1-ee",), {B: "was silent for 4 s"})


def test_the_last_one_that_leaves_is_kept_to_save() -> None:
    found = after(epoch(A), {A: computing(5)}, {A: LEFT})
    assert (found.keys, found.left) == ([A], {})


def test_of_several_that_leave_at_once_the_first_is_kept_to_save() -> None:
    found = after(epoch(A, B, C), {C: computing(5), B: computing(5)}, {A: SILENT, B: LEFT, C: LEFT})
    assert (found.keys, found.left) == ([B], {A: "was silent for 4 s", C: "left"})


def test_one_who_has_the_state_is_kept_until_another_has_it() -> None:
    found = after(epoch(A, B), {A: computing(5), B: receiving(2)}, {A: LEFT})
    assert (found.keys, found.left) == ([A, B], {})
    found = after(epoch(A), {A: computing(5)}, {A: LEFT}, {B: card(B)})
    assert (found.keys, found.joined) == ([A, B], (B,))


def test_members_more_than_a_step_apart_are_a_defect() -> None:
    with pytest.raises(AssertionError, match="more than a step apart"):
        after(epoch(A, B), {A: computing(7), B: computing(5)})
