"""Drills of every kind on real runs; minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from tests.drill.drills import assert_accounted, drill, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_an_ordinary_run_is_broken_in_every_way_and_ends_bitwise_as_if_it_had_not(tmp_path: Path) -> None:
    make(tmp_path)
    kinds = ["kill", "stop", "slow", "oom", "disk-full", "coordinator", "preempt", "bitflip"]
    args = ["--scenario", ",".join(kinds), "--count", "8", "--seed", "3", "--pause", "10", "--pace", "0.1"]
    code, found = drill(tmp_path, *args, "train.steps=300", "resources.processes=2", within_s=800)
    assert code == 0, json.dumps(found)
    assert found["same_digest"] is True
    assert (found["lost_samples"], found["repeated_samples"]) == (0, 0)
    assert_accounted(found)
    assert [fault["kind"] for fault in found["faults"]] == kinds
    by_kind = {fault["kind"]: fault for fault in found["faults"]}
    unnoticed = {kind for kind, fault in by_kind.items() if fault["detection_s"] is None}
    assert unnoticed <= {"slow"}, "a few seconds of it may be too short a matter"
    assert by_kind["stop"]["detection_s"] < 30, "long before a collective would time out"
    for kind in ("slow", "disk-full", "preempt"):
        assert by_kind[kind]["lost_steps"] == 0, kind
    assert by_kind["slow"]["stall_s"] > 0
    assert {kind for kind, fault in by_kind.items() if fault["resumed"]} == {"coordinator", "preempt"}


def test_islands_are_killed_stopped_cut_off_and_robbed_of_their_supervisor_and_lose_no_bit(tmp_path: Path) -> None:
    make(tmp_path)
    islands = ["fleet.islands=3", "fleet.deterministic=true", "train.steps=160", "train.batch=12"]
    kinds = ["kill", "stop", "partition", "preempt", "coordinator"]
    args = ["--scenario", ",".join(kinds), "--count", "5", "--seed", "17", "--pause", "8", "--pace", "0.45"]
    code, found = drill(tmp_path, *args, *islands, "checkpoint.every=50", "--keep", "kept", within_s=800)
    assert code == 0, json.dumps(found)
    assert found["same_digest"] is True
    assert (found["lost_samples"], found["repeated_samples"]) == (0, 0)
    assert_accounted(found)
    assert [fault["kind"] for fault in found["faults"]] == kinds
    assert all(fault["lost_steps"] <= 1 for fault in found["faults"]), found["faults"]
    assert not any(fault["resumed"] for fault in found["faults"]), "nobody had to start it again"
    kill, stop, partition, preempt, coordinator = found["faults"]
    assert coordinator["victim"] == "the supervisor"
    assert all(fault["detection_s"] is not None for fault in (kill, stop, partition, preempt))
    assert kill["stall_s"] < 20, "the others did not wait for it to start again"
    told = records(RunDir.of("drill", tmp_path / "kept").journal_file)
    assert [r["status"] for r in told if r["kind"] == "close"] == ["done"], "also without a supervisor"


def test_a_poisoned_batch_is_left_out_and_nothing_else_is(tmp_path: Path) -> None:
    make(tmp_path)
    code, found = drill(tmp_path, "--scenario", "nan", "--count", "2", "--seed", "1", within_s=600)
    assert code == 0, json.dumps(found)
    assert found["left_out_samples"] == 2 * 4
    assert found["same_digest"] is False, "it has read other batches"
    assert all(fault["detection_s"] is not None for fault in found["faults"])
    assert_accounted(found)
