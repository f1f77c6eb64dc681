"""The parts of the loop, each against something plain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.spec.run import Optimizer, Schedule
from shoal.train.muon import orthogonalise
from shoal.train.optim import Optimizers
from shoal.train.schedule import lr_ratio
from tests.train.tiny import losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")


def test_cosine_warms_up_peaks_and_ends_at_its_floor() -> None:
    schedule = Schedule(name="cosine", warmup_steps=10, min_ratio=0.1)
    ratios = [lr_ratio(schedule, step, 100) for step in range(100)]
    assert ratios[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(ratios) == ratios[10] == pytest.approx(1.0)
    assert ratios[-1] == pytest.approx(0.1)
    assert ratios[10:] == sorted(ratios[10:], reverse=True)


def test_warm_up_stable_decay_is_flat_until_its_decay() -> None:
    schedule = Schedule(name="wsd", warmup_steps=5, decay_steps=20, min_ratio=0.0)
    ratios = [lr_ratio(schedule, step, 100) for step in range(100)]
    assert set(ratios[5:80]) == {1.0}
    assert ratios[-1] == 0.0
    assert ratios[89] == pytest.approx(0.5)


def test_a_schedule_of_one_step_divides_by_nothing() -> None:
    for name in ("cosine", "wsd", "constant"):
        assert 0 <= lr_ratio(Schedule(name=name), 0, 1) <= 1  # type: ignore[arg-type]


def test_muon_pushes_all_singular_values_towards_one() -> None:
    torch.manual_seed(0)
    for shape in ((16, 64), (64, 16), (32, 32)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert float(values.min()) > 0.4
        assert float(values.max()) < 1.4


def test_state_laid_out_ahead_changes_nothing_about_adamw() -> None:
    def model() -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(8, 8)

    ours, theirs = model(), model()
    spec = Optimizer(lr=0.01, weight_decay=0.1)
    optimizers = Optimizers(spec, ours.named_parameters())
    groups = [{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.005, betas=spec.betas, eps=spec.eps, weight_decay=0.1, fused=True)
    for i in range(5):
        x = torch.full((4, 8), float(i))
        for m in (ours, theirs):
            m(x).pow(2).sum().backward()
        optimizers.step(ratio=0.5, factor=torch.ones(()))
        reference.step()
        reference.zero_grad()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_bf16_follows_float32(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    for world, shard in ((1, 1), (2, 2)):
        curves = []
        for precision in ("fp32", "bf16"):
            changes = {"name": f"{precision}-{world}", "train.precision": precision, "mesh.dp_shard": shard}
            curves.append(losses_of(train_on(make_run(data, **changes), tmp_path, world)))
        assert np.max(np.abs(curves[1] / curves[0] - 1)) < 2e-2
        assert not np.array_equal(*curves)


def test_a_loss_that_is_no_number_stops_the_run_before_the_update(tmp_path: Path) -> None:
    run = make_run(make_data(tmp_path / "data"), **{"train.optimizer.lr": 1e30, "train.clip": None})
    with pytest.raises(AssertionError, match=r"NumericsError: step [0-9]+ has loss .*lower train.optimizer.lr"):
        train_on(run, tmp_path, 1)


def test_a_step_record_says_what_was_read_and_when(tmp_path: Path) -> None:
    run_dir = train_on(make_run(make_data(tmp_path / "data"), **{"train.steps": 3}), tmp_path, 1)
    for i, r in enumerate(steps_of(run_dir)):
        assert (r["step"], r["position"], r["samples"], r["tokens"]) == (i + 1, 16 * i, 16, 16 * 32)
        assert set(r["time"]) == {"data_s", "compute_s", "optimizer_s"}
        assert sum(r["time"].values()) <= r["t"] - r["begin"] + 1e-3
