"""The plan beside what happened: which part is furthest off, and what is likely behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.decide.auto import decide
from shoal.guard.begin import create
from shoal.journal.rundir import RunDir
from shoal.observe.planned import Compared, compared, lines
from shoal.plan.expect import expected
from shoal.spec.shape import shape_of
from tests.train.tiny import make_data, make_run

PLAN = {
    "device": "H200",
    "figures": "shoal bench of 2026-11-15",
    "step_s": 1.0,
    "step_low_s": 0.9,
    "step_high_s": 1.2,
    "parts_s": {"products": 0.8, "update": 0.1},
}


def steps(data_s: float, compute_s: float, optimizer_s: float) -> list[dict[str, Any]]:
    time = {"data_s": data_s, "compute_s": compute_s, "optimizer_s": optimizer_s}
    whole = data_s + compute_s + optimizer_s
    return [
        {"kind": "step", "step": i, "t": 100 + i * whole, "begin": 100 + (i - 1) * whole, "time": time}
        for i in range(9)
    ]


@pytest.fixture
def planned(tmp_path: Path) -> RunDir:
    run_dir = RunDir.of("r", tmp_path)
    run_dir.path.mkdir(parents=True)
    run_dir.plan_file.write_text(json.dumps(PLAN))
    return run_dir


def test_the_part_that_is_furthest_off_is_named_with_its_likely_cause(planned: RunDir) -> None:
    for times, name, cause in (
        ((0.5, 0.9, 0.1), "waiting for data", "slow disk"),
        ((0.0, 1.4, 0.1), "forward and backward", "clocks"),
        ((0.0, 0.9, 0.6), "optimizer", "clocks"),
    ):
        found = compared(planned, steps(*times), [])
        assert isinstance(found, Compared)
        assert found.off == pytest.approx(0.5)
        assert found.worst is not None
        assert found.worst.name == name
        assert cause in lines(found)[-1]


def test_as_planned_nothing_is_named(planned: RunDir) -> None:
    found = compared(planned, steps(0.0, 0.91, 0.1), [])
    assert isinstance(found, Compared)
    assert found.worst is None
    assert found.as_json()["furthest_off"] is None


def test_a_plan_that_is_nowhere_near_is_told_in_words_not_percent(planned: RunDir) -> None:
    """ "+47916%" tells nobody anything: how many times as long, and that the machine was overloaded if it was."""
    plan = {**PLAN, "step_s": 0.089, "figures": "the catalogue", "load": 21.0, "cores": 2}
    planned.plan_file.write_text(json.dumps(plan))
    found = compared(planned, steps(0.0, 42.7, 0.1), [])
    assert isinstance(found, Compared)
    text = "\n".join(lines(found))
    assert "it took 42.80 s, 481 times as long" in text
    assert "this machine was overloaded when the run began (21 programs on 2 cores)" in text
    assert found.as_json()["overloaded"]
    assert "%" not in text
    planned.plan_file.write_text(json.dumps({**plan, "load": 0.3}))
    quiet = compared(planned, steps(0.0, 42.7, 0.1), [])
    assert isinstance(quiet, Compared)
    assert "`shoal bench` measures it" in lines(quiet)[-1]
    planned.plan_file.write_text(json.dumps({**PLAN, "step_s": 30.1}))
    fast = compared(planned, steps(0.0, 6.4, 0.1), [])
    assert isinstance(fast, Compared)
    assert "it took 6.50 s, 22% of that" in lines(fast)[0]


def test_parts_are_the_devices_where_it_has_a_timeline(planned: RunDir) -> None:
    told = steps(0.0, 0.6, 0.4)
    for record in told:
        record["device"] = {"step": record["step"] - 1, "wait_s": 0.0, "forward_s": 0.3, "backward_s": 0.6}
        record["device"]["optimizer_s"] = 0.1
    found = compared(planned, told, [])
    assert isinstance(found, Compared)
    assert {part.name: part.measured_s for part in found.parts} == pytest.approx(
        {"waiting for data": 0.0, "forward and backward": 0.9, "optimizer": 0.1}
    )
    assert found.worst is None


def test_why_there_is_no_plan_is_said(tmp_path: Path) -> None:
    run = decide(make_run(make_data(tmp_path / "data")), tmp_path).run
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "own.toml").write_text("device = 3")
    run_dir = RunDir.of(run.name, tmp_path)
    run_dir.path.mkdir(parents=True)
    create(run_dir, run)
    found = compared(run_dir, steps(0.0, 0.9, 0.1), [])
    assert isinstance(found, str)
    assert "own.toml: device must be a list" in lines(found)[0]


def test_no_plan_and_too_few_steps_say_nothing(planned: RunDir, tmp_path: Path) -> None:
    assert compared(planned, steps(0.0, 0.9, 0.1)[:4], [{"attempt": None, "step": 0}]) is None
    assert compared(RunDir.of("other", tmp_path), steps(0.0, 0.9, 0.1), []) is None


def test_a_new_run_has_a_plan_of_this_machine(tmp_path: Path) -> None:
    run = decide(make_run(make_data(tmp_path / "data")), tmp_path).run
    run_dir = RunDir.of(run.name, tmp_path)
    run_dir.path.mkdir(parents=True)
    create(run_dir, run)
    plan = json.loads(run_dir.plan_file.read_text())
    assert plan["device"] == "CPU"
    assert plan["step_low_s"] < plan["step_s"] < plan["step_high_s"]
    assert sum(plan["parts_s"].values()) == pytest.approx(plan["step_s"])


def test_islands_share_the_work(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    changes = {"train.batch": 16, "resources.processes": 1, "model.dim": 256, "model.ffn_dim": 1024}
    alone = decide(make_run(data, **changes), tmp_path).run
    four = decide(make_run(data, **{**changes, "fleet.islands": 4}), tmp_path).run
    one, many = (expected(run, shape_of(run.model)) for run in (alone, four))
    assert many["devices"] == 4
    # Four processes of a processor are as fast together as one that has all of it, but for what is paid by the piece.
    # Each island updates the whole model once a step, with a quarter of the memory's bandwidth.
    assert many["parts_s"]["update"] == pytest.approx(4 * one["parts_s"]["update"])
    assert 0.9 < many["parts_s"]["elementwise"] / one["parts_s"]["elementwise"] < 1.5
