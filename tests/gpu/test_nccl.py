"""Real NCCL between ranks: each has a GPU of its own where there are enough, else they share one (shoal.shared_gpu).

    pytest -s tests/gpu/test_nccl.py

All of it says what is right, and nothing how fast it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.shared_gpu import SETTING
from shoal.track import journal
from shoal.track.rundir import RunDir
from shoal.train.decide_torch import impossible_schedules
from tests.gpu.train_apart import train_all
from tests.train.matrix import Case, Job, Matrix, case
from tests.train.tiny import digest_of, losses_of, make_data, make_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

STEPS = 6
CASES = [
    case(dp_shard=2),
    case(dp_replicate=2),
    case(tp=2),
    case(pp=2, schedule="1f1b", micro_batch=4),
    case(cp=2, cp_method="ring"),
    case(cp=2, cp_method="all_to_all"),
    case("qwen3 tied", tp=2, dp_shard=2),
    case("mixture", dp_shard=2, ep=2),
    case("qwen3 tied", {"train.optimizer.name": "muon"}, pp=2, tp=2, schedule="1f1b", micro_batch=2),
    case("qwen3 tied", pp=2, schedule="zbv", micro_batch=2),
]
POSSIBLE = [c for c in CASES if c.mesh.get("schedule") not in impossible_schedules()]
FP8 = {"resources.device": "cuda", "train.precision": "fp8", "train.compile": False, "train.steps": STEPS}
RUN_FILE = """
name: any
model: {dim: 256, layers: 4, heads: 8, kv_heads: 4}
data: {train: data, seq_len: 256}
train: {steps: 40, batch: 16, optimizer: {lr: 1e-3}, schedule: {warmup_steps: 3}, compile: false}
mesh: {micro_batch: 8, dp_shard: 2}
resources: {processes: 2, device: cuda}
checkpoint: {every: 5}
guard: {backoff_s: 0.1}
track: {mlflow: false}
"""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """All of it trained, several at a time."""
    matrix = Matrix(tmp_path_factory.mktemp("nccl"), STEPS, "cuda")
    jobs = [job for c in POSSIBLE for job in matrix.jobs(c)]
    eight = {world: {**FP8, "name": f"fp8-{world}", "mesh.dp_shard": world} for world in (1, 2)}
    jobs += [Job(make_run(matrix.data, **changes), world) for world, changes in eight.items()]
    began = time.perf_counter()
    train_all(matrix.folder, jobs)
    print(f"\n{len(jobs)} jobs in {time.perf_counter() - began:.0f} s")
    return matrix


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in POSSIBLE])
def test_a_mesh_over_nccl_trains_on_the_curve_of_one_process(case: Case, matrix: Matrix) -> None:
    result = matrix.result(case)
    print(f"{case.name}: loss {result.loss:.1e}, norm {result.norm:.1e}, logits {result.logits:.1e}")
    assert result.good, result


def test_8_bits_on_two_ranks_go_past_the_step_whose_traffic_is_counted(matrix: Matrix) -> None:
    one, two = (losses_of(RunDir.of(f"fp8-{world}", matrix.folder)) for world in (1, 2))
    assert len(two) == STEPS > 3
    print("largest relative difference", np.max(np.abs(two / one - 1)))
    assert np.max(np.abs(two / one - 1)) < 2e-2
    counted = [r for r in journal.records(RunDir.of("fp8-2", matrix.folder).journal_file) if r["kind"] == "traffic"]
    assert {(row["axis"], row["op"]) for row in counted[0]["rows"]} >= {("shard", "all_gather")}


def test_a_run_whose_groups_share_a_gpu_says_so(matrix: Matrix) -> None:
    start = next(r for r in journal.records(RunDir.of("fp8-2", matrix.folder).journal_file) if r["kind"] == "start")
    if torch.cuda.device_count() < 2:
        assert "2 processes share 1 GPU" in start["sharing"]
    else:
        assert "sharing" not in start


def test_a_rank_that_is_killed_costs_nothing_but_time(tmp_path: Path) -> None:
    make_data(tmp_path / "data", documents=4000)
    (tmp_path / "run.yaml").write_text(RUN_FILE)

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "shoal", "train", "run.yaml", f"name={name}"]
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, SETTING: "1"})

    assert start("whole").wait(120) == 0
    killed, run_dir = start("killed"), RunDir.of("killed", tmp_path)
    while not any(r["kind"] == "step" and r["step"] >= 12 for r in _records(run_dir)):
        assert killed.poll() is None
        time.sleep(0.01)
    os.kill(next(r for r in _records(run_dir) if r["kind"] == "attempt")["pids"][1], signal.SIGKILL)
    assert killed.wait(120) == 0
    (failure,) = [r for r in _records(run_dir) if r["kind"] == "failure"]
    assert (failure["rank"], failure["cause"]) == (1, "killed")
    assert digest_of(run_dir) == digest_of(RunDir.of("whole", tmp_path))


def _records(run_dir: RunDir) -> list[journal.Record]:
    return journal.records(run_dir.journal_file) if run_dir.journal_file.exists() else []
