"""`shoal drill`: what is planned, what is measured, and real runs that are broken and end as if nobody had."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.drill.account import Account
from shoal.drill.drill import ALONE, Result
from shoal.drill.live import Live
from shoal.drill.means import Broken, Stage, do
from shoal.drill.measure import measure, noticed, samples
from shoal.drill.plan import MIX, SCENARIOS, STEPS_A_FAULT, Planned, environment, plan
from shoal.drill.table import table
from shoal.errors import UsageError
from shoal.journal.journal import Record
from shoal.journal.rundir import RunDir
from shoal.spec.run import Run
from tests.drill.drills import assert_accounted, drill, leftovers, make, start
from tests.guard.fake import until
from tests.patience import limit
from tests.warm import Executed

pytestmark = pytest.mark.usefixtures("warm_starts")
BATCH = 4


def a_run(**changes: Any) -> Run:
    spec: dict[str, Any] = {"name": "x", "data": {"train": "data"}, "train": {"steps": 100}}
    return Run.model_validate({**spec, **changes})


# The plan


def test_the_same_seed_breaks_the_same_things_at_the_same_moments() -> None:
    run = a_run()
    assert plan("kill", run, 5, seed=3) == plan("kill", run, 5, seed=3)
    assert plan("kill", run, 5, seed=3) != plan("kill", run, 5, seed=4)
    for seed in range(50):
        steps = [p.step for p in plan("kill", run, 5, seed)]
        assert steps == sorted(set(steps))
        assert 1 <= steps[0] <= steps[-1] < 90, "there is something left to do after the last one"


def test_several_scenarios_take_turns_and_a_mix_has_only_what_applies() -> None:
    assert [p.kind for p in plan("kill,preempt", a_run(), 4, seed=0)] == ["kill", "preempt"] * 2
    assert [p.kind for p in plan("kill, stop", a_run(), None, seed=0)] == ["kill", "stop"], "each once"
    assert len(plan(MIX, a_run(), None, seed=0)) == 1
    alone = {p.kind for seed in range(40) for p in plan(MIX, a_run(), 8, seed)}
    islands = {p.kind for seed in range(40) for p in plan(MIX, a_run(fleet={"islands": 3}), 8, seed)}
    assert "partition" not in alone
    assert alone >= {"kill", "stop", "slow", "bitflip", "disk-full", "coordinator", "preempt"}
    assert islands - alone == {"partition"}
    assert islands <= set(SCENARIOS)


@pytest.mark.parametrize(
    ("scenario", "changes", "sentence"),
    [
        ("partition", {}, "partition does not apply to this run: it has no islands; set fleet.islands=2 or more."),
        ("bitflip", {"checkpoint": {"every": 0}}, "it saves nothing before its end; set checkpoint.every."),
        ("disk-full", {"checkpoint": {"every": 0}}, "it saves nothing before its end; set checkpoint.every."),
        ("bitflip", {"checkpoint": {"keep": 1}}, "checkpoint.keep=1 leaves no other checkpoint to go on from"),
        ("flood", {}, "there is no scenario 'flood'; there are kill, stop, "),
        ("kil", {}, "there is no scenario 'kil'; did you mean kill?"),
        ("kill,", {}, "--scenario 'kill,' lacks a name; there are kill, stop, "),
        ("kill,mix", {}, "mix is all that apply, so no other scenario is named beside it."),
        ("kill,stop,slow", {}, "--count 1 leaves out stop, slow: 3 scenarios are named."),
        ("kill", {"train": {"steps": 5}}, f"too few for 1 fault: at least {STEPS_A_FAULT} are needed."),
    ],
)
def test_what_does_not_apply_is_refused_with_one_sentence(scenario: str, changes: dict, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan(scenario, a_run(**changes), 1, seed=0)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_poisoned_batch_is_told_to_the_workers_when_they_start() -> None:
    run = a_run()
    if getattr(run.guard, "numerics", "stop") == "stop":
        with pytest.raises(UsageError, match="so it would end there"):
            plan("nan", run, 1, seed=0)
        return
    planned = plan("nan,kill", run, 3, seed=0)
    assert environment(planned) == {"SHOAL_POISON": f"nan:{planned[0].step},{planned[2].step}"}
    assert environment(plan("kill", run, 2, seed=0)) == {}


def test_wrong_numbers_and_a_wrong_file_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(make(tmp_path))
    place = ["--workspace", str(tmp_path / "place")]
    for args, said in (
        (["--count", "0"], "--count must be more than 0, and a number."),
        (["--pause", "nan"], "--pause must be more than 0, and a number."),
        (["--pace", "inf"], "--pace must be 0 or more, and a number."),
        (["--count", "11"], "train.steps=60 is too few for 11 faults: at least 66 are needed."),
        (["--keep", file], "run.yaml is no folder; --keep takes one."),
        (["train.stepz=60"], "did you mean train.steps?"),
        (["--baseline", str(tmp_path / "none")], "is no run directory; --baseline takes that of a finished run"),
        (["--scenario", "partition"], "it has no islands"),
        (["data.train=nowhere"], "nowhere"),
    ):
        assert main(["drill", file, *place, *args]) in (2, 78)
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "place").exists() or not any((tmp_path / "place").iterdir())


def test_seed_is_the_drill_s_own_and_that_of_the_run_is_an_override() -> None:
    from shoal.cli import drill as verb
    from shoal.spec.overrides import split_overrides

    asked = ["run.yaml", "--seed", "7", "seed=3", "--train.steps", "60"]
    assert split_overrides(asked, verb.OWN_OPTIONS) == (["run.yaml", "--seed", "7"], ["seed=3", "train.steps=60"])
    assert split_overrides(["--seed=7"], verb.OWN_OPTIONS) == (["--seed=7"], [])
    assert split_overrides(["--seed", "7"]) == ([], ["seed=7"])


# What is measured


def told(steps: list[int], begin_t: float, attempt: int = 0, took: float = 1.0) -> list[Record]:
    return [
        {
            "kind": "step",
            "t": begin_t + took * (i + 1),
            "begin": begin_t + took * i,
            "attempt": attempt,
            "step": step,
            "position": (step - 1) * BATCH,
            "samples": BATCH,
        }
        for i, step in enumerate(steps)
    ]


CALM = told(list(range(1, 21)), 0.0)


def test_a_restart_costs_its_stall_and_the_steps_that_were_done_again() -> None:
    """Killed 0.5 s after step 8, seen 0.1 s later, back 5 s after that from step 5."""
    failure = {"kind": "failure", "t": 9.0, "at": 8.6, "cause": "killed", "attempt": 0}
    broken = [*told(list(range(1, 9)), 0.0), failure, *told(list(range(6, 21)), 13.0, attempt=1)]
    (found,) = measure([Broken("kill", "rank 0", 8, 8.5, 8.5)], broken, CALM)
    assert found.detection_s == pytest.approx(0.1)
    assert found.stall_s == pytest.approx(14.0 - 8.0 - 1.0)
    assert (found.lost_steps, found.lost_samples, found.repeated_samples) == (3, 0, 0)


def test_steps_that_are_done_again_after_the_next_fault_are_lost_by_the_one_that_undid_them() -> None:
    """The first takes the run from step 12 to step 4; the second comes at step 8 and costs one more."""
    first = told(list(range(1, 13)), 0.0)
    then = told(list(range(5, 9)), 20.0, attempt=1)
    last = told(list(range(8, 21)), 40.0, attempt=2)
    faults = [Broken("kill", "rank 0", 12, 12.5), Broken("kill", "rank 0", 8, 24.5)]
    found = measure(faults, [*first, *then, *last], CALM)
    assert [fault.lost_steps for fault in found] == [8, 1]


def test_a_fault_that_nobody_noticed_says_so_and_evaluation_is_no_stall() -> None:
    first, then = told(list(range(1, 11)), 0.0), told(list(range(11, 21)), 15.0)
    eval_ = {"kind": "eval", "t": 15.0, "begin": 10.0, "step": 10, "attempt": 0}
    (found,) = measure([Broken("slow", "rank 1", 9, 9.5, 12.0)], [*first, eval_, *then], CALM)
    assert found.detection_s is None
    assert found.stall_s == pytest.approx(0.0)


def test_samples_that_were_lost_or_read_twice_are_found_and_told_by_step() -> None:
    skipped = [r for r in told(list(range(1, 21)), 0.0) if r["step"] != 7]
    assert samples(skipped, CALM).lost == [(7, BATCH)]
    twice = told(list(range(1, 21)), 0.0)
    twice[9]["position"] -= 2  # step 10 reads two samples of step 9 again, and not its own last two
    found = samples(twice, CALM)
    assert (found.repeated, found.lost) == ([(10, 2)], [(10, 2)])
    by_fault = measure([Broken("kill", "a", 3, 3.5), Broken("kill", "b", 9, 9.5)], twice, CALM)
    assert [(f.lost_samples, f.repeated_samples) for f in by_fault] == [(0, 0), (2, 2)]
    assert samples(CALM[:15], CALM).lost == [(step, BATCH) for step in range(16, 21)], "it did not get to the end"


def test_a_batch_that_was_left_out_on_purpose_is_not_lost() -> None:
    broken = told(list(range(1, 21)), 0.0)
    for record in broken[6:]:
        record["position"] += BATCH
    skip = {"kind": "skip", "t": 6.5, "begin": 6.0, "step": 7, "batch": 6, "attempt": 0}
    assert samples(broken, CALM).lost == [(7, BATCH)]
    found = samples([*broken, skip], CALM)
    assert (found.lost, found.repeated, found.left_out) == ([], [], BATCH)


def test_what_a_fault_is_noticed_by_depends_on_what_it_was() -> None:
    other = {"kind": "epoch", "t": 5.0, "noticed": 4.5, "left": {"0": "closed"}}
    mine = {"kind": "epoch", "t": 6.0, "noticed": 5.5, "left": {"2": "silent"}}
    assert noticed(Broken("kill", "", 3, 4.0, island=2), [other, mine], 99) == 5.5
    damaged = {"kind": "warning", "t": 7.0, "text": "checkpoint passed over and quarantined: step-1"}
    waits = {"kind": "warning", "t": 6.0, "text": "the checkpoint that is due at step 50 waits"}
    assert noticed(Broken("bitflip", "", 3, 4.0), [waits, damaged], 99) == 7.0
    assert noticed(Broken("bitflip", "", 3, 8.0), [waits, damaged], 99) is None


# What the ledger says of the time


def test_a_ledger_that_does_not_account_for_the_drill_s_own_clock_fails_the_drill() -> None:
    opened = {"kind": "open", "t": 0.0, "began": -1.0}
    records: list[Record] = [opened, *told(list(range(1, 21)), 0.0), {"kind": "close", "t": 20.0}]
    right = Account.of(records, 21.1)
    assert right.right
    assert right.parts_s == pytest.approx(21.0)
    assert right.off == pytest.approx(0.1 / 21.1)
    calm = Account.of(records)
    assert calm.off == 0, "without a clock, by its own records"

    def result(account: Account, calm: Account) -> Result:
        return Result(steps=20, planned=0, ended=True, how="", account=account, calm=calm)

    assert result(right, calm).passed
    assert "ledger sums to 21.00 s of 21.10 s, 0.5% off" in table(result(right, calm))
    half_a_second = Account.of(records, 21.5)
    unsaid = Account.of(records[:-5], 21.0)  # the last steps are told by nobody
    sooner = Account.of(records, 20.0)  # time is counted that has not passed
    for wrong in (half_a_second, unsaid, sooner):
        assert not wrong.right
        for found in (result(wrong, calm), result(right, wrong)):
            assert not found.passed
            assert not found.as_json()["passed"]
            assert "not passed: the ledger does not account for the time" in table(found)


def test_other_parameters_fail_the_drill_where_they_have_to_be_the_same() -> None:
    def result(digest: str, has_to: bool) -> Result:
        return Result(20, 0, True, "", digest=digest, calm_digest="a", has_to_be_same=has_to)

    assert result("a", True).passed
    assert result("b", False).passed
    assert not result("b", True).passed
    assert table(result("b", True)).endswith("not passed: the final parameters are others")


def test_the_time_in_which_a_scheduler_had_not_started_the_run_again_is_accounted_for_too() -> None:
    first = [{"kind": "open", "t": 0.0}, *told(list(range(1, 11)), 0.0), {"kind": "close", "t": 10.0}]
    then = [{"kind": "open", "t": 60.0}, *told(list(range(11, 21)), 60.0, attempt=1), {"kind": "close", "t": 70.0}]
    account = Account.of([*first, *then], 70.5)
    assert account.right
    assert (account.parts_s, account.between_s) == (20.0, 50.0)
    assert account.as_json()["right"] is True
    assert sum(account.as_json()["parts_s"].values()) == pytest.approx(20.0)


# Real runs


@pytest.mark.slow
@pytest.mark.timeout(600)  # five starts of torch, on a machine that may be busy; half a minute when it is not
def test_a_run_that_is_killed_preempted_and_robbed_of_its_checkpoint_ends_bitwise_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", Executed)  # as a person starts it
    make(tmp_path)
    args = ["--scenario", "kill,preempt,bitflip", "--count", "3", "--seed", "5", "--keep", "kept"]
    code, found = drill(tmp_path, *args, within_s=550)
    assert code == 0, json.dumps(found)
    assert found["passed"]
    assert found["seed"] == 5
    assert found["same_digest"] is True
    assert [fault["kind"] for fault in found["faults"]] == ["kill", "preempt", "bitflip"]
    assert all(fault["detection_s"] is not None for fault in found["faults"])
    assert [fault["resumed"] for fault in found["faults"]] == [False, True, False]
    assert (found["lost_samples"], found["repeated_samples"]) == (0, 0)
    kill, preempt, bitflip = found["faults"]
    assert kill["lost_steps"] <= kill["step"] + 2, "early in the run, perhaps before the first save was written"
    assert preempt["lost_steps"] == 0, "told to stop, it saves"
    assert bitflip["lost_steps"] > 0, "the newest checkpoint could not be used"
    assert found["goodput"] < found["calm_goodput"]
    assert_accounted(found)
    assert not (tmp_path / "runs").exists(), "the user's runs are not touched"

    # A real journal in the ledger: everything is accounted for, and each failure has its cost.
    command = [sys.executable, "-m", "shoal", "report", "drill", "--json", "--no-png", "--workspace", "kept"]
    report = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout)
    assert sum(report["ledger"]["parts_s"].values()) == pytest.approx(report["ledger"]["total_s"], abs=1e-6)
    assert [cost["cause"] for cost in report["failure_costs"]] == ["killed", "killed"]
    assert [cost["lost_steps"] for cost in report["failure_costs"]] == [kill["lost_steps"], bitflip["lost_steps"]]
    assert report["advice"]["saves_s"] > 0


@pytest.mark.timeout(300)
def test_a_save_that_is_in_flight_when_a_bit_is_flipped_leaves_no_newer_checkpoint_that_is_good(tmp_path: Path) -> None:
    make(tmp_path)
    memory = tmp_path / "memory"
    memory.mkdir()
    args = ["train", str(tmp_path / "run.yaml"), "--workspace", str(tmp_path), *ALONE, "train.steps=2000"]
    # It takes long to publish one, so that soon after it the next one is under way and a later one is waiting for it.
    env = {"SHOAL_MEMORY": str(memory), "SHOAL_FAULT": "before-publish:sleep=2;step:pace=0.2"}
    live = Live(RunDir.of("small", tmp_path), args, env, 200.0, lambda: None)
    try:
        assert live.wait(lambda: len(live.of("checkpoint")) > 1, 200)
        published = live.of("checkpoint")[-1]["t"]
        assert live.wait(lambda: "is still being written" in str(live.of("warning", since=published)), 200)
        flipped = do(Planned("bitflip", 0, 0.0, 0.0, 12345), Stage(live, tmp_path, memory, 1.0))
        assert flipped is not None
        assert live.wait(lambda: len(live.of("start")) > 1, 200)
        again = live.of("start")[-1]
        assert again["step"] < int(flipped.victim.split("-")[1]), "it went on from an older one than that"
    finally:
        live.end()


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_drill_s_run_and_leaves_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    process = start(tmp_path)
    until(lambda: any("attempt" in path.read_text() for path in tmp_path.glob(".drill-*/runs/*/journal.jsonl")), 60)
    assert leftovers(tmp_path) != []
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=limit(60))
    assert process.returncode == 143
    assert "shoal: stopped." in err
    until(lambda: leftovers(tmp_path) == [], 10)
