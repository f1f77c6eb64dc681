"""The same claims on a GPU. They run wherever torch sees one (`pytest tests/gpu`) and are skipped elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.journal import journal
from shoal.journal.rundir import RunDir
from tests.train.tiny import digest_of, losses_of, make_data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

RUN_FILE = """
name: any
model: {dim: 256, layers: 4, heads: 8, kv_heads: 4}
data: {train: data, eval: held-out, seq_len: 256}
train: {steps: 20, batch: 16, optimizer: {lr: 1e-3}, schedule: {warmup_steps: 3}}
mesh: {micro_batch: 8}
resources: {processes: 1}
checkpoint: {every: 5}
track: {mlflow: false}
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    make_data(folder / "data", documents=4000)
    make_data(folder / "held-out", documents=200, seed=1)
    (folder / "run.yaml").write_text(RUN_FILE)
    return folder


def start(workspace: Path, name: str, *overrides: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shoal", "train", "run.yaml", f"name={name}", *overrides]
    return subprocess.Popen(command, cwd=workspace)


def shoal_train(workspace: Path, name: str, *overrides: str) -> RunDir:
    assert start(workspace, name, *overrides).wait(300) == 0
    return RunDir.of(name, workspace)


def test_float32_on_the_gpu_gives_the_curve_of_the_cpu(workspace: Path) -> None:
    cpu = losses_of(
        shoal_train(workspace, "cpu", "resources.device=cpu", "train.precision=fp32", "resources.threads=8")
    )
    gpu = losses_of(shoal_train(workspace, "gpu", "resources.device=cuda", "train.precision=fp32"))
    print("largest relative difference", np.max(np.abs(gpu / cpu - 1)))
    assert np.max(np.abs(gpu / cpu - 1)) < 1e-4


@pytest.mark.parametrize("compile", ["false", "true"])
def test_bf16_follows_float32(workspace: Path, compile: str) -> None:
    exact = losses_of(shoal_train(workspace, f"fp32-{compile}", "train.precision=fp32"))
    half = losses_of(shoal_train(workspace, f"bf16-{compile}", f"train.compile={compile}"))
    print("largest relative difference", np.max(np.abs(half / exact - 1)))
    assert np.max(np.abs(half / exact - 1)) < 1e-2


def test_killed_on_the_gpu_and_restarted_the_parameters_are_bitwise_the_same(workspace: Path) -> None:
    slow = "train.steps=60"
    whole = shoal_train(workspace, "whole", slow)
    process, run_dir = start(workspace, "killed", slow), RunDir.of("killed", workspace)
    while not (records := _steps(run_dir)) or records[-1]["step"] < 12:
        time.sleep(0.002)
    os.kill(next(r for r in journal.records(run_dir.journal_file) if r["kind"] == "attempt")["pids"][0], signal.SIGKILL)
    assert process.wait(300) == 0
    assert any(r["kind"] == "failure" for r in journal.records(run_dir.journal_file))
    assert digest_of(run_dir) == digest_of(whole)


def _steps(run_dir: RunDir) -> list[dict[str, Any]]:
    if not run_dir.journal_file.exists():
        return []
    return [r for r in journal.records(run_dir.journal_file) if r["kind"] == "step"]
