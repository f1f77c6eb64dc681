"""The ledger: every microsecond of a run has one label, and the labels say what a person would say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.observe.ledger import PARTS, Ledger, ledger
from tests.track.journals import Story, crash_and_finish, make_run

KINDS = [
    *("open", "attempt", "start", "step", "step", "step", "eval", "checkpoint", "checkpoint_failed"),
    *("failure", "stopping", "close", "warning", "decision", "finished"),
]


@st.composite
def any_record(draw: st.DrawFn) -> dict[str, Any]:
    """Not a sensible run: any records in any order, clocks that jump, steps that end before they begin."""
    kind = draw(st.sampled_from(KINDS))
    t = draw(st.floats(0, 1e4))
    record: dict[str, Any] = {"v": 1, "kind": kind, "t": t, "attempt": draw(st.integers(0, 4))}
    if kind in ("start", "step", "eval", "checkpoint", "checkpoint_failed"):
        record["step"] = draw(st.integers(0, 30))
    if kind in ("step", "eval", "checkpoint", "checkpoint_failed"):
        record["begin"] = t - draw(st.floats(-10, 100))
        record["time"] = {"data_s": draw(st.floats(-1, 50))}
    return record


def check(found: Ledger) -> None:
    assert set(found.parts_us) == set(PARTS)
    assert sum(found.parts_us.values()) == found.total_us
    assert min(found.parts_us.values()) >= 0
    assert found.between_us >= 0
    assert 0 <= found.goodput <= 1


@settings(deadline=None)
@given(st.lists(any_record(), max_size=60), st.one_of(st.none(), st.floats(0, 2e4)))
def test_the_parts_sum_to_the_total_exactly_for_any_journal(records: list[dict[str, Any]], now: float | None) -> None:
    check(ledger(records, now))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["steps", "eval", "checkpoint", "failure", "stop"]), st.integers(1, 9)), max_size=25
    ),
    st.floats(0.001, 2.0),
)
def test_a_real_run_of_any_shape_accounts_for_its_whole_life(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int]], step_s: float
) -> None:
    story = make_run(tmp_path_factory.mktemp("run")).open().start()
    story.step_s, story.data_s = step_s, step_s / 10
    saved, slept_s = 0, 0.0
    for act, n in acts:
        if act == "steps":
            story.steps(story.step + n)
        elif act == "checkpoint":
            story.checkpoint(n / 10)
            saved = story.step
        elif act == "eval":
            story.eval(n / 10)
        elif act == "failure":
            story.failure(n / 10).wait(n / 5).start(at_step=saved, startup_s=n / 10)
        else:
            story.close("stopped").wait(n * 10)
            slept_s += n * 10
            story.open(resumed=True).start(at_step=saved)
    story.close()
    found = ledger(story.records)
    check(found)
    life_s = story.records[-1]["t"] - story.records[0]["t"]
    assert found.between_us / 1e6 == pytest.approx(slept_s, abs=1e-4)
    assert found.total_s + found.between_us / 1e6 == pytest.approx(life_s, abs=1e-4)
    # What counts is each step once, whatever was lost on the way.
    assert found.seconds("training") == pytest.approx(story.step * step_s * 0.9, abs=1e-3 * (1 + story.step))


def test_a_crash_costs_what_it_cost(tmp_path: Path) -> None:
    """Killed at step 150 with a checkpoint at 100: 50 steps of 0.5 s are done again."""
    found = ledger(crash_and_finish(make_run(tmp_path)).records)
    assert found.seconds("training") == pytest.approx(200 * 0.48, abs=1e-4)
    assert found.seconds("data_wait") == pytest.approx(200 * 0.02, abs=1e-4)
    # The last record of the broken attempt to the failure: 0.2 s of an unfinished step.
    assert found.seconds("lost") == pytest.approx(50 * 0.5 + 0.2, abs=1e-3)
    assert found.seconds("recovery") == pytest.approx(1.0 + 3.0 + 0.001, abs=1e-4)
    assert found.seconds("startup") == pytest.approx(3.0 + 0.001, abs=1e-4)
    assert found.seconds("evaluation") == pytest.approx(3.0, abs=1e-4)
    assert found.seconds("checkpoint") == pytest.approx(0.8, abs=1e-4)
    assert found.seconds("stopping") == pytest.approx(0.3, abs=1e-4)
    assert found.seconds("other") == pytest.approx(248 * 0.001, abs=1e-3)
    assert found.goodput == pytest.approx(96 / found.total_s)


def test_a_restart_that_fails_again_before_its_first_step_is_all_recovery(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10).checkpoint().failure(after_s=0.5)
    story.wait(1).start(startup_s=2).failure(after_s=0).wait(2).start(startup_s=2).steps(12).close()
    found = ledger(story.records)
    assert found.seconds("recovery") == pytest.approx(1 + 2 + 2 + 2 + 0.001, abs=1e-4)
    assert found.seconds("lost") == pytest.approx(0.5, abs=1e-4)


def test_giving_up_ends_as_stopping_and_is_no_recovery(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10).failure(action="giving up").wait(4).close("failed", 75)
    found = ledger(story.records)
    assert found.seconds("recovery") == 0
    assert found.seconds("stopping") == pytest.approx(4.3)


def test_the_time_nobody_was_running_is_told_apart(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10).checkpoint().close("stopped", 143)
    story.wait(86_400).open(resumed=True).start().steps(20).close()
    found = ledger(story.records)
    assert found.sessions == 2
    assert found.between_us == 86_400_000_000
    assert found.seconds("startup") == pytest.approx(6.002, abs=1e-4)
    assert found.seconds("lost") == 0


def test_steps_after_the_checkpoint_of_a_killed_supervisor_are_lost_once_they_are_done_again(tmp_path: Path) -> None:
    """No failure record, no close: the machine went away. The next supervisor says so much later."""
    story = make_run(tmp_path).open().start().steps(10).checkpoint().steps(17)
    assert ledger(story.records).seconds("lost") == 0
    story.wait(5000).open(resumed=True)
    story.write("failure", attempt=0, rank=None, cause="supervisor-lost", evidence="no close", action="going on")
    story.start(at_step=10).steps(20).close()
    found = ledger(story.records)
    assert found.seconds("lost") == pytest.approx(7 * 0.5)
    assert found.between_us == 5_000_000_000
    assert found.seconds("recovery") == 0


def test_a_checkpoint_written_while_training_goes_on_costs_nothing(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10)
    began = story.t
    story.steps(20)
    story.write("checkpoint", attempt=0, step=10, begin=began, bytes=1, path="step-00000010-term-1")
    story.close()
    assert ledger(story.records).seconds("checkpoint") == pytest.approx(10 * 0.001, abs=1e-4)


def test_a_run_that_is_alive_is_accounted_for_until_now(tmp_path: Path) -> None:
    story: Story = make_run(tmp_path).open().start().steps(10)
    found = ledger(story.records, now=story.t + 7)
    check(found)
    assert found.total_s == pytest.approx(story.t + 7 - story.records[0]["t"])
    assert found.seconds("other") == pytest.approx(7 + 9 * 0.001, abs=1e-3)
    assert ledger(story.close().records, now=story.t + 500).total_s == pytest.approx(story.t - story.records[0]["t"])


def test_an_empty_journal_is_an_empty_ledger() -> None:
    found = ledger([])
    check(found)
    assert (found.total_us, found.goodput) == (0, 0.0)
