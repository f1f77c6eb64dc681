"""ZeRO is another engine and not another run: the curve, the norms, the guard and the checkpoints are Shoal's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.checkpoint import newest
from shoal.decide.auto import decide
from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.spec.run import Run
from shoal.train.worker import work
from tests.patience import until
from tests.ranks import rank_outcomes
from tests.train.tiny import digest_of, losses_of, make_data, make_run, steps_of, train_on

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("deepspeed", "kept_ranks")]

STEPS = 6
# Gradients are clipped at every step, and both kinds of decay are there.
SHORT = {"data.seq_len": 64, "train.steps": STEPS, "train.optimizer.lr": 1e-2, "train.schedule.warmup_steps": 1}
SHORT |= {"train.clip": 0.5, "train.optimizer.decay_embeddings": False, "mesh.micro_batch": 4}
DDP = {"mesh.dp_replicate": 2, "mesh.dp_shard": 1}
FSDP = {"mesh.dp_replicate": 1, "mesh.dp_shard": 2}


def zero(stage: int, offload: str = "none", **more: Any) -> dict[str, Any]:
    return {**FSDP, "engine.name": "deepspeed", "engine.zero": stage, "engine.offload": offload, **more}


def norms_of(run_dir: RunDir) -> np.ndarray:
    return np.array([r["grad_norm"] for r in steps_of(run_dir)])


def apart(a: np.ndarray, b: np.ndarray) -> float:
    assert len(a) == len(b) == STEPS
    return float(np.max(np.abs(a / b - 1)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("zero") / "data", masked=True)


@pytest.fixture(scope="module")
def ddp(data: Path) -> RunDir:
    found = train_on(make_run(data, **{**SHORT, **DDP, "name": "ddp"}), data.parent, 2)
    assert (norms_of(found) > 0.5).all()
    return found


@pytest.mark.parametrize(
    ("name", "asked"),
    {
        "zero 1": zero(1),
        "zero 2": zero(2),
        "zero 3": zero(3),
        "zero 3, no accumulation": zero(3, **{"mesh.micro_batch": 8}),
        "zero 2, offload": zero(2, "cpu"),
        "zero 3, offload, computed twice": zero(3, "cpu", **{"mesh.recompute": "full"}),
    }.items(),
)
def test_every_stage_gives_the_losses_and_gradient_norms_of_ddp(
    name: str, asked: dict[str, Any], ddp: RunDir, data: Path
) -> None:
    """AdamW hides a constant factor of a gradient; its norm does not."""
    found = train_on(make_run(data, **{**SHORT, **asked, "name": name.translate({32: "-", 44: None})}), data.parent, 2)
    assert apart(losses_of(found), losses_of(ddp)) < 1e-6
    assert apart(norms_of(found), norms_of(ddp)) < 2e-6


def test_a_tied_head_and_bf16_are_those_of_ddp(data: Path) -> None:
    more = {"model.tie_embeddings": True, "train.precision": "bf16"}
    reference = train_on(make_run(data, **{**SHORT, **DDP, **more, "name": "tied-ddp"}), data.parent, 2)
    found = train_on(make_run(data, **{**SHORT, **zero(3), **more, "name": "tied-zero"}), data.parent, 2)
    assert abs(losses_of(found)[0] / losses_of(reference)[0] - 1) < 1e-6
    assert abs(norms_of(found)[0] / norms_of(reference)[0] - 1) < 1e-4
    assert apart(losses_of(found), losses_of(reference)) < 2e-3


def test_a_run_goes_from_fsdp_to_zero_and_back_on_the_curve_of_one_that_stayed(ddp: RunDir, data: Path) -> None:
    """Weights, both moments and the step count travel."""
    for until_step, asked in ((2, FSDP), (4, zero(3)), (5, zero(1)), (STEPS, FSDP)):
        run = make_run(data, **{**SHORT, **asked, "name": "moves", "checkpoint.background": True})
        if until_step < STEPS:
            stop_after(run, data.parent, until_step)
        else:
            moved = train_on(run, data.parent, 2)
    assert apart(losses_of(moved), losses_of(ddp)) < 1e-6
    assert apart(norms_of(moved), norms_of(ddp)) < 2e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_rank_costs_what_was_not_saved_and_no_bit(stage: int, data: Path) -> None:
    asked = {**SHORT, **zero(stage), "checkpoint.every": 2, "checkpoint.background": True}
    whole = train_on(make_run(data, **{**asked, "name": f"whole-{stage}"}), data.parent, 2)
    run = make_run(data, **{**asked, "name": f"killed-{stage}"})
    killed = die_before(run, data.parent, 5)
    resumed = train_on(run, data.parent, 2)
    assert killed.path == resumed.path
    assert digest_of(resumed) == digest_of(whole)


def test_a_gradient_that_is_no_number_changes_nothing(ddp: RunDir, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_POISON", "nan@1:2")
    around = make_run(data, **{**SHORT, **DDP, "name": "around-ddp"})
    reference = train_on(around, data.parent, 2)
    for stage in (1, 3):
        found = train_on(make_run(data, **{**SHORT, **zero(stage), "name": f"around-{stage}"}), data.parent, 2)
        assert [r["position"] for r in steps_of(found)] == [r["position"] for r in steps_of(reference)]
        assert apart(losses_of(found), losses_of(reference)) < 1e-6
    assert not np.array_equal(losses_of(reference), losses_of(ddp))


def test_one_process_trains_with_zero_too(ddp: RunDir, data: Path) -> None:
    asked = {**zero(3, "cpu"), "mesh.dp_shard": 1, "name": "alone"}
    found = train_on(make_run(data, **{**SHORT, **asked}), data.parent, 1)
    assert apart(losses_of(found), losses_of(ddp)) < 1e-6
    assert apart(norms_of(found), norms_of(ddp)) < 2e-6


def stop_after(run: Run, workspace: Path, step: int) -> RunDir:
    return _ended(run, workspace, lambda rank, taken: taken == step)


def die_before(run: Run, workspace: Path, step: int) -> RunDir:
    """SIGKILL of a rank, once something was saved."""

    def ends(rank: int, taken: int) -> bool:
        if taken == step and rank == 1:
            until(lambda: newest(RunDir.of(run.name, workspace).checkpoints) is not None, within_s=60)
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    return _ended(run, workspace, ends)


def _ended(run: Run, workspace: Path, ends: Any) -> RunDir:
    decided = decide(run, workspace, 2).run
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    first = len(steps_of(run_dir))
    asked = first - 1

    def rank(rank: int, world: int) -> None:
        def stop() -> bool:
            nonlocal asked
            asked += 1
            return bool(ends(rank, asked))

        os.environ["SHOAL_ATTEMPT"] = str(first)
        work(run_dir, decided, join(decided), stop)

    outcomes = rank_outcomes(rank, 2, grace_s=0.2)
    assert not all(o.ok for o in outcomes)
    return run_dir
