"""A run that gets another length or schedule goes on from the rate it had, as it was chosen."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal.decide.length import with_steps
from shoal.errors import SpecError, UsageError
from shoal.spec import dump, load
from shoal.spec.run import Run
from shoal.spec.schedule import MOST_PAST, Past
from shoal.train.changes import changes
from shoal.train.course import course
from shoal.train.prolong import once, prolonged, way_on
from shoal.train.schedule import lr_ratio
from tests.train.test_resume import train_and_die
from tests.train.tiny import digest_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

LR = 1e-2


def run_of(steps: int, **schedule: Any) -> Run:
    train = {"steps": steps, "optimizer": {"lr": LR}, "schedule": {"warmup_steps": 0, **schedule}}
    return Run.model_validate({"name": "x", "data": {"train": "d"}, "train": train})


def longer(before: Run, at: int, steps: int, **schedule: Any) -> Run:
    asked = {**before.train.schedule.model_dump(), **schedule}
    train = before.train.model_copy(update={"steps": steps, "schedule": type(before.train.schedule)(**asked)})
    after = prolonged(before, with_steps(before.model_copy(update={"train": train}), Path("."), at), at)
    return once(after, before.train.schedule)


def rates(run: Run) -> list[float]:
    return [lr_ratio(run.train.schedule, step, run.steps) for step in range(run.steps)]


@pytest.mark.parametrize(("name", "would"), [("cosine", 0.55), ("wsd", 1.0)])
def test_a_finished_run_is_not_prolonged_without_a_choice(name: str, would: float) -> None:
    before = run_of(100, name=name)
    with pytest.raises(UsageError) as e:
        longer(before, 100, 200)
    said = str(e.value)
    assert "the learning rate at step 100 would jump from 0.001 to " in said
    assert said.count("\n") == 0
    assert all(f"{way} (" in said for way in ("prolong=keep", "rewarm", "decay"))
    assert longer(before, 100, 200, prolong="jump").train.schedule.past[0].then == "jump"
    assert rates(longer(before, 100, 200, prolong="jump"))[100] == pytest.approx(would, abs=0.01)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_each_choice_begins_at_the_rate_that_the_run_had(name: str) -> None:
    before = run_of(100, name=name, warmup_steps=10)
    old = rates(before)
    kept = rates(longer(before, 100, 200, prolong="keep"))
    assert kept == [*old, *[old[-1]] * 100]
    warmed = rates(longer(before, 100, 200, prolong="rewarm"))
    assert warmed[:100] == old
    assert warmed[100:110] == pytest.approx([0.1 + 0.9 * (i + 1) / 10 for i in range(10)])
    assert warmed[110:] == rates(run_of(100, name=name, warmup_steps=10))[10:]
    fell = rates(longer(before, 100, 200, prolong="decay", min_ratio=0.0))
    assert fell[:101] == pytest.approx([*old, old[-1]])
    assert fell[100:] == sorted(fell[100:], reverse=True)
    assert fell[-1] == 0.0
    for one in (kept, warmed, fell):  # no step moves the rate as far as the jump did
        assert max(abs(a - b) for a, b in pairwise(one[99:])) < 0.1


def test_a_stable_phase_is_prolonged_without_a_choice() -> None:
    before = run_of(100, name="wsd", warmup_steps=5)
    after = longer(before, 60, 200)
    assert after.train.schedule.past[0].then is None
    assert rates(after) == rates(run_of(200, name="wsd", warmup_steps=5))
    assert longer(run_of(9, name="constant"), 9, 20).train.schedule.past[0].then is None
    with pytest.raises(UsageError, match="at step 90 would jump from "):
        longer(before, 90, 200)
    assert rates(longer(before, 60, 100, prolong="decay"))[60] == 1.0  # the decay begins now
    assert rates(longer(before, 60, 100, prolong="decay"))[80] == pytest.approx(1 - 0.9 * 20 / 39)


def test_a_run_is_prolonged_again_and_again() -> None:
    first = longer(run_of(100, warmup_steps=10), 100, 200, prolong="rewarm")
    second = longer(first, 150, 300, prolong="keep")
    third = longer(second, 300, 400)  # the kept rate goes on: nothing jumps
    fourth = longer(third, 400, 500, prolong="decay", min_ratio=0.0)
    assert rates(fourth)[:150] == rates(first)[:150]
    assert set(rates(fourth)[150:400]) == {rates(first)[150]}
    assert rates(fourth)[-1] == 0.0
    assert [p.until for p in fourth.train.schedule.past] == [100, 150, 300, 400]
    assert [p.then for p in fourth.train.schedule.past] == ["rewarm", "keep", None, "decay"]


def test_the_past_is_in_the_run_file_bit_for_bit(tmp_path: Path) -> None:
    run = longer(run_of(100, warmup_steps=7), 93, 200, prolong="decay")
    (tmp_path / "run.yaml").write_text(dump(run))
    again = load(tmp_path / "run.yaml").run
    assert again == run
    assert rates(again) == rates(run)
    assert prolonged(run, again, 150) == run  # a restart changes nothing
    assert prolonged(run, load(tmp_path / "run.yaml", ["train.schedule.past=[]"]).run, 150) == run
    with pytest.raises(UsageError, match="would jump"):
        prolonged(run, load(tmp_path / "run.yaml", ["train.schedule.min_ratio=0"]).run, 150)  # a changed schedule, too


def test_shares_of_a_prolonged_run_are_of_what_is_left() -> None:
    run = longer(run_of(100), 100, 200, prolong="rewarm", warmup_steps="20%")
    assert run.train.schedule.warmup_steps == 20
    assert rates(run)[119] == 1.0


@pytest.mark.parametrize(
    ("at", "more", "says"),
    [
        (100, {"prolong": "decay"}, "lower that, or take keep"),
        (100, {"prolong": "rewarm"}, "warmup_steps is 0, and must be at least 1"),
        (100, {"prolong": "rewarm", "warmup_steps": 100}, "fit into the 100 steps that are left"),
        (100, {"prolong": "keep", "min_ratio": 0.5}, None),
    ],
)
def test_a_choice_that_does_nothing_is_refused(at: int, more: dict[str, Any], says: str | None) -> None:
    if says is None:
        longer(run_of(100), at, 200, **more)
        return
    with pytest.raises(UsageError, match=says):
        longer(run_of(100), at, 200, **more)


def test_keeping_a_rate_of_nothing_is_refused_and_not_suggested() -> None:
    with pytest.raises(UsageError, match="nothing would be learnt"):
        longer(run_of(100, min_ratio=0.0), 100, 200, prolong="keep")
    for schedule in ({}, {"min_ratio": 0.0}, {"name": "constant"}, {"name": "wsd", "min_ratio": 0.0}):
        before = run_of(100, **schedule)
        given = dict(value.rsplit(".", 1)[-1].split("=") for value in way_on(before, 100, 200).split())
        assert given.pop("steps") == "200"
        longer(before, 100, 200, **given)  # what is suggested is taken


def test_a_past_of_other_hands_is_refused(tmp_path: Path) -> None:
    run = longer(run_of(100), 100, 200, prolong="keep")
    twice = longer(run, 150, 300, prolong="jump")
    for wrong in ("until: 100", "until: 3", "until: 0"):
        (tmp_path / "run.yaml").write_text(dump(twice).replace("until: 150", wrong))
        with pytest.raises(SpecError, match="past"):
            load(tmp_path / "run.yaml")
    other = run.train.schedule.model_copy(update={"past": (Past(until=3, steps=9),)})
    with pytest.raises(SpecError, match="another history"):
        prolonged(run, run.model_copy(update={"train": run.train.model_copy(update={"schedule": other})}), 150)


def test_show_says_the_rate_at_each_turn_and_what_follows() -> None:
    run = longer(run_of(100, warmup_steps=10), 100, 200, prolong="decay", min_ratio=0.01)
    assert course(run) == [
        "rate from step 1: up to 0.01 over 10 steps, then cosine to 0.001 at step 100",
        "rate from step 101: 0.001, which it had, falling to 0.0001 at step 200",
    ]
    kept = longer(run_of(100), 50, 200, prolong="keep")
    assert course(kept) == [
        "rate from step 1: 0.01, then cosine to 0.001 at step 100, until it was replaced at step 50",
        "rate from step 51: 0.00543, which it had, to step 200",
    ]


def test_a_prolonged_run_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    """4 steps, prolonged to 8: once without a break, once killed before the step after next, and started again."""
    first = make_run(make_data(tmp_path / "data"), **{"train.steps": 4, "checkpoint.every": 1})
    after = longer(first, 4, 8, prolong="rewarm")
    digests = []
    for name in ("straight", "killed"):
        train_on(first.model_copy(update={"name": name}), tmp_path, 1)
        run = after.model_copy(update={"name": name})
        if name == "killed":
            train_and_die(run, tmp_path, 1, step=6, victim=0, saved=True)
        run_dir = train_on(run, tmp_path, 1)
        told = {r["step"]: r["lr"] for r in steps_of(run_dir)}
        assert list(told.values()) == [first.train.optimizer.lr * ratio for ratio in rates(after)]
        digests.append(digest_of(run_dir))
    assert digests[0] == digests[1]


def test_changed_betas_and_a_lost_past_are_told_in_one_line() -> None:
    before = run_of(100)
    after = run_of(100)
    betas = after.train.optimizer.model_copy(update={"betas": (0.9, 0.99)})
    after = after.model_copy(update={"train": after.train.model_copy(update={"optimizer": betas})})
    (said,) = changes(before, after, 50)
    assert "train.optimizer.betas.1 was 0.95 and is 0.99" in said
    assert "about 100 steps" in said
    (said,) = changes(before, run_of(200), 100)
    assert "jumps at step 100: the checkpoint's run had 0.001 there and this one has 0.00" in said
    assert not changes(before, longer(before, 100, 200, prolong="jump"), 100)
    assert not changes(before, before, 50)


def test_the_past_has_an_end_before_a_rate_cannot_be_found_any_more() -> None:
    pieces = tuple(Past(until=1 + i, steps=10**6, name="constant", then="keep") for i in range(MOST_PAST))
    full = run_of(10**6, name="constant", past=pieces)
    assert lr_ratio(full.train.schedule, 10**6 - 1, 10**6) == 1.0
    with pytest.raises(UsageError, match="was prolonged 200 times, which is the most"):
        longer(full, 1000, 2 * 10**6, name="cosine", prolong="keep")
    with pytest.raises(ValueError, match="at most 200"):
        run_of(10**6, past=(*pieces, pieces[-1]))
