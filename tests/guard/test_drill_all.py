"""Every scenario on a real run, as far as it applies; minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.guard.drills import drill, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_what_stands_still_runs_out_or_goes_wrong_costs_what_the_table_says(tmp_path: Path) -> None:
    make(tmp_path)
    scenario = "stop,disk-full,oom,coordinator,slow"
    args = ["--scenario", scenario, "--count", "5", "--seed", "3", "train.steps=300", "resources.processes=2"]
    code, found = drill(tmp_path, *args, within_s=1700)
    assert code == 0, found
    assert found["same_digest"] is True
    stop, full, oom, coordinator, slow = found["faults"]
    assert stop["detection_s"] < 15, "named long before a collective would time out"
    assert full["detection_s"] is not None
    assert full["lost_steps"] == 0, "a save that fails costs no step"
    assert oom["detection_s"] is not None
    assert coordinator["resumed"]
    assert slow["lost_steps"] == 0
    assert slow["stall_s"] > 0


def test_a_poisoned_batch_is_left_out_and_nothing_else_is(tmp_path: Path) -> None:
    make(tmp_path)
    code, found = drill(tmp_path, "--scenario", "nan", "--count", "2", "--seed", "1", within_s=600)
    assert code == 0, found
    assert found["left_out_samples"] == 2 * 4
    assert found["same_digest"] is False, "it has read other batches"
    assert all(fault["detection_s"] is not None for fault in found["faults"])


def test_islands_lose_members_and_no_bit(tmp_path: Path) -> None:
    make(tmp_path)
    islands = ["fleet.islands=3", "fleet.deterministic=true", "train.steps=6000", "checkpoint.every=500"]
    scenario = ["--scenario", "kill,coordinator,preempt", "--count", "3", "--seed", "2"]
    code, found = drill(tmp_path, *scenario, *islands, "train.batch=12", within_s=1700)
    assert code == 0, found
    assert found["same_digest"] is True
    kill, *_ = found["faults"]
    assert found["lost_steps"] == 0, "nobody restarted"
    assert kill["stall_s"] < 20
