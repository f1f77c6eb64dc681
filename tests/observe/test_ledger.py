"""The ledger: every microsecond of a run has one label, and the labels say what a person would say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.observe.advice import advice
from shoal.observe.causes import CAUSES
from shoal.observe.history import history
from shoal.observe.time_ledger import PARTS, Ledger, ledger
from tests.journal.journals import Story, crash_and_finish, make_run

KINDS = [
    *("open", "attempt", "start", "step", "step", "step", "eval", "checkpoint", "checkpoint_failed"),
    *("failure", "stopping", "close", "warning", "decision", "finished", "epoch", "island", "rewind", "skip", "exit"),
]
RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
MAYBE_TIME = st.one_of(st.none(), st.floats(0, 1e4))


@st.composite
def any_record(draw: st.DrawFn) -> dict[str, Any]:
    """Not a sensible run: any records in any order, clocks that jump, steps that end before they begin."""
    kind = draw(st.sampled_from(KINDS))
    t = draw(st.floats(0, 1e4))
    record: dict[str, Any] = {"v": 1, "kind": kind, "t": t, "attempt": draw(st.integers(0, 4))}
    if kind == "open":
        record["began"] = draw(MAYBE_TIME)
    if kind in ("start", "step", "eval", "checkpoint", "checkpoint_failed"):
        record["step"] = draw(st.integers(0, 30))
    if kind in ("step", "eval", "checkpoint", "checkpoint_failed"):
        record["begin"] = t - draw(st.floats(-10, 100))
        record["time"] = {"data_s": draw(st.floats(-1, 50))}
    if kind == "step" and draw(st.booleans()):
        record |= {"epoch": draw(st.integers(1, 5)), "islands": draw(st.lists(st.integers(0, 3), unique=True))}
    if kind == "failure":
        record |= {"cause": draw(st.sampled_from(["killed", "hang", "supervisor-lost"])), "at": draw(MAYBE_TIME)}
        record |= draw(st.sampled_from([{}, {"island": 1}, {"island": 2, "noticed": 5000.0}]))
    if kind == "epoch":
        record |= {"number": draw(st.integers(1, 5)), "noticed": draw(MAYBE_TIME), "joined": [1]}
        record["left"] = draw(st.sampled_from([{}, {"1": "closed"}, {"1": "closed", "2": "silent"}]))
    return record


def check(found: Ledger) -> None:
    assert set(found.parts_us) == set(PARTS)
    assert sum(found.parts_us.values()) == found.total_us
    assert min(found.parts_us.values()) >= 0
    assert found.between_us >= 0
    assert 0 <= found.goodput <= 1
    # The costs of the faults are their parts; only what nobody is to blame for is not among them.
    for part in ("detection", "recovery", "lost"):
        costs = [getattr(cost, f"{part}_us") for cost in found.costs]
        assert all(cost >= 0 for cost in costs)
        assert sum(costs) <= found.parts_us[part]


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
    assert found.seconds("lost") == pytest.approx(50 * 0.5, abs=1e-3)
    # Nobody says when it happened: from the last sign of life to when it was noticed.
    assert found.seconds("detection") == pytest.approx(0.2, abs=1e-3)
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
    assert found.seconds("detection") == pytest.approx(0.5, abs=1e-4)
    assert [cost.recovery_us for cost in found.costs] == pytest.approx([3_000_000, 4_001_000], abs=100)


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


def test_a_session_begins_with_its_process_and_never_before_the_end_of_the_last_one(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10).checkpoint().close("stopped", 143)
    story.wait(100).open(resumed=True)
    again = story.records[-1]
    story.start().steps(20).close()
    without = ledger(story.records)
    again["began"] = again["t"] - 2.5
    found = ledger(story.records)
    assert found.seconds("startup") == pytest.approx(without.seconds("startup") + 2.5)
    assert found.between_us == pytest.approx(97_500_000)
    again["began"] = again["t"] - 1000
    check(found := ledger(story.records))
    assert found.between_us == 0
    assert found.total_us == without.total_us + without.between_us


def test_a_session_ends_when_its_process_leaves_and_what_others_remark_later_is_no_part_of_it(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10).close()
    closed = ledger(story.records)
    story.wait(4.0).write("exit", session=0)
    story.wait(60.0).write("warning", text="tracking is behind", source="track")
    check(found := ledger(story.records))
    assert found.total_us == closed.total_us + 4_000_000
    assert found.seconds("stopping") == pytest.approx(closed.seconds("stopping") + 4.0)


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
    # What starts it again is the recovery from that; the time until somebody did is told apart.
    assert found.seconds("recovery") == pytest.approx(3.001, abs=1e-4)
    (cost,) = found.costs
    assert (cost.fault.cause, cost.lost_steps, cost.away_us) == ("supervisor-lost", 7, 5_000_000_000)
    assert cost.total_us == sum(found.parts_us[part] for part in ("detection", "recovery", "lost"))


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


def fail_at(story: Story, cause: str, at_s: float, told_s: float, **fields: Any) -> Story:
    """A failure that happened, or was seen, `at_s` after the last record and is told of `told_s` after it."""
    at, story.t = story.t + at_s, story.t + told_s
    action = {"action": "restarting", "evidence": "", "rank": 1}
    story.write("failure", attempt=story.attempt, cause=cause, at=round(at, 6), **action, **fields)
    return story


def test_a_dead_worker_is_seen_at_once_so_what_it_broke_off_is_lost_and_the_rest_is_recovery(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10).checkpoint()
    fail_at(story, "killed", 0.3, 0.8).wait(1).start(at_step=10, startup_s=2).steps(20).close()
    found = ledger(story.records)
    assert found.seconds("lost") == pytest.approx(0.3, abs=1e-5)
    assert found.seconds("detection") == 0
    assert found.seconds("recovery") == pytest.approx(0.5 + 1 + 2 + 0.001, abs=1e-4)


def test_a_hang_takes_until_somebody_lost_patience_and_that_is_detection(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10).checkpoint()
    fail_at(story, "hang", 30.0, 31.0).wait(1).start(at_step=10, startup_s=2).steps(20)
    fail_at(story, "hang", 9.0, 10.0, noticed=story.t + 8, since=story.t + 3).start(startup_s=1).steps(30).close()
    first, second = ledger(story.records).costs
    assert (first.detection_us, first.lost_us) == (30_000_000, 0)
    assert first.recovery_us == pytest.approx(1e6 + 3.001e6, abs=100)
    assert (second.lost_us, second.detection_us) == (3_000_000, 5_000_000), "it says since when, and when it was seen"


def test_what_somebody_stopped_without_saving_is_nobody_s_fault(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(10).checkpoint().failure().start(at_step=10).steps(20)
    story.close("stopped", 143).wait(5).open(resumed=True).start(at_step=10).steps(30).close()
    found = ledger(story.records)
    assert found.seconds("lost") == pytest.approx(5.0, abs=1e-3)
    assert [cost.lost_steps for cost in found.costs] == [0]
    assert found.costs[0].lost_us == 0


@pytest.mark.parametrize("cause", [*CAUSES, "straggler", "preempted"])
def test_the_advice_after_a_failure_follows_its_cause(tmp_path: Path, cause: str) -> None:
    """Islands keep the others going when something strikes one from outside; they do not mend what comes again."""
    story = make_run(tmp_path).open().start().steps(50)
    fail_at(story, cause, 1.0, 1.0).wait(1).start(at_step=0, startup_s=20).steps(60).close()
    best = advice(ledger(story.records), history(story.records))
    assert best is not None
    outside = cause in ("killed", "node-lost", "hardware", "crash", "network", "supervisor-lost")
    assert ("fleet.islands" in best.sentence) == outside
    if not outside:
        assert CAUSES.get(cause, "") in best.sentence
        assert (RUNBOOKS / f"{cause}.md").exists()
        assert f"(docs/runbooks/{cause}.md)" in best.sentence


def test_the_advice_is_what_saves_most(tmp_path: Path) -> None:
    def said(story: Story) -> tuple[str, float]:
        best = advice(ledger(story.records), history(story.records))
        assert best is not None
        return best.sentence, best.saves_s

    waits = make_run(tmp_path, "waits")
    waits.data_s = 0.2
    sentence, saves_s = said(waits.open().start().steps(100).eval(3).close())
    assert sentence.startswith("Waiting for data cost 35% of the time: ")
    assert saves_s == pytest.approx(20, abs=1e-3)
    slow = make_run(tmp_path, "slow").open().start().steps(50)
    slow.activity("checkpoint", 9.0, bytes=1, path="x", stall_s=9.0, persist_s=9.0).steps(60).close()
    assert "checkpoint.background" in said(slow)[0]
    alone = make_run(tmp_path, "alone").open().start().steps(100).failure().start(at_step=0).steps(120).close()
    for record in alone.records:
        record.pop("world", None)  # one process: there is nobody who need not restart
    assert "checkpoint.every" in said(alone)[0]
    assert "docs/runbooks" not in said(alone)[0]
    fine = make_run(tmp_path, "fine").open().start(startup_s=0.1).steps(200).close()
    for record in fine.records:
        record.get("time", {}).update(data_s=0.0)
    assert advice(ledger(fine.records), history(fine.records)) is None


def test_the_wait_for_the_last_save_is_no_reason_to_save_less(tmp_path: Path) -> None:
    """It is made however rarely others are. One in the middle, waited for as long, is one."""
    last = make_run(tmp_path, "last").open().start(startup_s=0.1).steps(100)
    last.activity("checkpoint", 9.0, bytes=1, path="x", stall_s=0.01, persist_s=9.0).close()
    middle = make_run(tmp_path, "middle").open().start(startup_s=0.1).steps(50)
    middle.activity("checkpoint", 9.0, bytes=1, path="x", stall_s=0.01, persist_s=9.0).steps(100)
    middle.activity("checkpoint", 9.0, bytes=1, path="x", stall_s=0.01, persist_s=9.0).close()
    for story in (last, middle):
        for record in story.records:
            record.get("time", {}).update(data_s=0.0)
    assert advice(ledger(last.records), history(last.records)) is None
    best = advice(ledger(middle.records), history(middle.records))
    assert best is not None
    assert best.part == "checkpoint"
    assert best.saves_s == pytest.approx(4.5, abs=0.01)
    assert ledger(last.records).seconds("checkpoint") == pytest.approx(9.0)  # which the ledger still has
