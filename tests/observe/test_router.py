"""What the journal, the report and the trackers say of a router's balance."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from shoal.cli.main import main
from shoal.observe import router
from shoal.observe.steps import steps_of
from shoal.track.events import Reader
from shoal.track.to_tensorboard import TAGS
from tests.journal.journals import Story, make_run

# Two layers of four experts: one even, one with a favourite and a dead one.
LOADS = torch.tensor([[10, 10, 10, 10], [30, 6, 4, 0]])


def test_balance_is_measured_layer_by_layer() -> None:
    found = router.record(7, LOADS, biases=torch.tensor([[0.0, 0, 0, 0], [-0.3, 0.1, 0.1, 0.1]]), first_layer=3)
    assert found["imbalance"] == [1.0, 3.0]
    assert (found["imbalance_max"], found["imbalance_mean"]) == (3.0, 2.0)
    assert (found["dead"], found["dead_share"]) == ([0.0, 0.25], 0.125)
    shares = [30 / 40, 6 / 40, 4 / 40]
    assert found["entropy"] == [1.0, pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(4), abs=1e-4)]
    assert found["bias_range"] == [0.0, 0.4]
    assert (found["step"], found["experts"], found["first_layer"]) == (7, 4, 3)
    assert found["loads"] == LOADS.tolist()
    assert "ep_imbalance" not in found
    assert json.loads(json.dumps(found)) == found


def test_processes_that_share_experts_have_a_balance_of_their_own() -> None:
    loads = torch.tensor([[30, 10, 10, 30], [40, 40, 0, 0]])
    found = router.record(1, loads, ep=2)
    assert found["ep_imbalance"] == [1.0, 2.0]  # uneven experts, even processes; and the reverse is seen as well
    assert (found["ep"], found["ep_imbalance_max"]) == (2, 2.0)
    assert router.step_fields(loads, ep=2) == {"expert_imbalance": 2.0, "expert_dead": 0.25, "ep_imbalance": 2.0}
    assert router.step_fields(loads) == {"expert_imbalance": 2.0, "expert_dead": 0.25}


def test_a_model_without_experts_has_nothing_to_tell() -> None:
    assert router.step_fields(torch.zeros(0, 0)) == {}


def test_no_token_at_all_is_no_division_by_zero() -> None:
    found = router.record(1, torch.zeros(1, 4))
    assert (found["imbalance"], found["entropy"], found["dead"]) == ([0.0], [0.0], [1.0])


def test_a_large_model_s_record_stays_small() -> None:
    """Sixty layers of 256 experts; the journal of a million steps holds 20,000 of these."""
    generator = torch.Generator().manual_seed(0)
    found = router.record(50, torch.randint(0, 9999, (60, 256), generator=generator), torch.zeros(60, 256), ep=8)
    assert "loads" not in found
    assert len(json.dumps(found)) < 3000
    assert [step for step in range(1, 151) if router.due(step)] == [1, 50, 100, 150]


def routed_run(workspace: Path) -> Story:
    """Fifty steps of a run whose router evens out, and a restart that does the last twenty again."""
    story = make_run(workspace).open().start()
    for step, loads in ((1, LOADS), (50, torch.tensor([[11, 10, 10, 9], [14, 10, 10, 6]]))):
        story.steps(step)
        story.write("router", attempt=0, **router.record(step, loads, ep=2, first_layer=1))
    story.failure().start(at_step=30).steps(50)
    story.write("router", attempt=1, **router.record(50, torch.tensor([[11, 10, 10, 9], [12, 10, 10, 8]]), ep=2))
    return story.close()


def test_the_report_says_how_even_the_experts_are_and_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routed_run(tmp_path)
    assert main(["report", "demo", "--no-png", "--workspace", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert (
        "experts     at step 50 1.15x the mean load over all layers; layer 1 is the worst\n"
        "            and the busiest of 2 processes 1.10x their mean\n" in page
    )
    assert main(["report", "demo", "--no-png", "--json", "--workspace", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["router"]["imbalance"] == [1.1, 1.2]


def test_the_report_does_not_hide_a_collapse_between_two_router_records() -> None:
    steps = [
        {"step": 1, "expert_imbalance": 3.0, "expert_dead": 0.0},
        {"step": 15, "expert_imbalance": 8.0, "expert_dead": 0.6875},
        {"step": 60, "expert_imbalance": 2.3, "expert_dead": 0.0},
    ]
    assert router.lines(None, steps_of(steps)) == [
        "experts     the busiest has 2.30x the mean load of its layer, 0.0% have no token at step 60; "
        "at worst the busiest has 8.00x the mean load of its layer, 68.8% have no token at step 15"
    ]


def test_step_fields_become_metrics(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(1)
    fields = router.step_fields(LOADS, ep=2)
    record = {**story.records[-1], "step": 2, **fields}
    with open(story.run_dir.journal_file, "a") as f:
        f.write(json.dumps(record) + "\n")
    dense, sparse = (e.values for e in Reader(story.run_dir.journal_file).batch(100) if e.kind == "metrics")
    assert set(sparse) - set(dense) == set(router.STEP_METRICS)
    assert {key: sparse[key] for key in router.STEP_METRICS} == fields
    assert set(router.STEP_METRICS) <= set(TAGS)
