"""Batches that are left out: the order stays a pure function of the step."""

from __future__ import annotations

import random

from shoal.data.skips import Skips


def read(skips: Skips, steps: int) -> list[int]:
    return [skips.batch_of(step) for step in range(steps)]


def test_every_batch_that_is_not_left_out_is_read_once_and_in_order() -> None:
    chance = random.Random(0)
    for _ in range(200):
        out = set(chance.sample(range(60), chance.randrange(30)))
        skips = Skips()
        for batch in chance.sample(sorted(out), len(out)):
            skips.add(batch)
        assert read(skips, 40) == [b for b in range(100) if b not in out][:40]
        assert len(skips) == len(out)


def test_without_skips_step_and_batch_are_the_same() -> None:
    assert read(Skips(), 5) == [0, 1, 2, 3, 4]


def test_neighbours_and_overlaps_are_one_span() -> None:
    skips = Skips([[8, 9], [2, 3]])
    skips.add(4)
    skips.add(1, 5)
    assert skips.spans == [[1, 5], [8, 9]]
    assert Skips(skips.spans).spans == skips.spans


def test_leaving_out_the_batch_of_a_step_gives_it_the_next_one_and_changes_no_step_before_it() -> None:
    skips = Skips([[3, 4]])
    before = read(skips, 10)
    skips.add(skips.batch_of(6))
    assert read(skips, 6) == before[:6]
    assert read(skips, 9)[6:] == before[7:10]


def test_a_checkpoint_alone_knows_what_was_read_before_it() -> None:
    """The journal may tell of a branch that was left: a batch that this state has read is not left out afterwards."""
    skips = Skips([[0, 99]])
    skips.resume(saved=[[5, 6]], step=10, heard=[[4, 8], [11, 13], [20, 20]])
    assert skips.spans == [[5, 6], [12, 13], [20, 20]]  # step 10 had read up to batch 11
    assert skips.batch_of(10) == 14


def test_a_checkpoint_from_before_there_were_skips_goes_on_as_it_did() -> None:
    skips = Skips()
    skips.resume(saved=[], step=10)
    assert skips.batch_of(10) == 10
