"""A rank whose GPU another user slows is named by its device's clock, within 20 steps; before that nobody is.

    SHOAL_TEST_SHARE_GPU=1 pytest -s tests/gpu/test_slow_gpu.py

Two ranks over NCCL, on two GPUs where there are, else on one (shoal.shared_gpu): there both have half of it, and the
competitor takes its share out of the half of one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.decide.auto import decide
from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.readable import straggler as in_words
from shoal.shared_gpu import SETTING
from shoal.spec import dump
from tests.train.tiny import make_data, make_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

QUIET_STEPS, WITHIN = 40, 20
MODEL = {"model.dim": 768, "model.layers": 6, "model.heads": 12, "model.kv_heads": 12, "model.ffn_dim": 2048}
# Much to compute for each exchange: on a shared card those go through sockets.
BATCH = {
    "data.seq_len": 512,
    "train.batch": 256,
    "mesh.micro_batch": 64,
    "train.steps": 100_000,
    "train.compile": False,
}
DEVICE = {"resources.device": "cuda", "train.precision": "bf16", "checkpoint.every": 1_000_000}


class Run:
    """A run of two ranks under its supervisor, with traps (slowed_worker.py)."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        os.environ[SETTING] = "1"
        data = make_data(folder / "data", documents=4000)
        self.control, self.run_dir = folder / "control", RunDir.of("slowed", folder)
        self.control.mkdir()
        self.run_dir.path.mkdir(parents=True)
        run = decide(make_run(data, **{"name": "slowed", **MODEL, **BATCH, **DEVICE, **changes}), folder, 2).run
        self.run_dir.spec_file.write_text(dump(run))
        script = Path(__file__).with_name("slowed_worker.py")
        command = [sys.executable, str(script), "--supervise", str(self.run_dir.path), "2", str(self.control)]
        self.process = subprocess.Popen(command, env=os.environ.copy(), cwd=Path(__file__).resolve().parents[2])

    def records(self, kind: str) -> list[journal.Record]:
        file = self.run_dir.journal_file
        return [r for r in journal.records(file) if r["kind"] == kind] if file.exists() else []

    def until(self, happened: Any, within_s: float = 240.0) -> None:
        deadline = time.monotonic() + within_s
        while not happened():
            assert self.process.poll() is None, "the run has ended"
            assert time.monotonic() < deadline, "it has not happened"
            time.sleep(0.05)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.mark.parametrize("mesh", [{"mesh.dp_shard": 2}, {"mesh.dp_replicate": 2}], ids=["FSDP", "DDP"])
def test_a_gpu_with_a_competitor_is_named_by_its_rank(tmp_path: Path, mesh: dict[str, int]) -> None:
    run = Run(tmp_path, **mesh)
    try:
        run.until(lambda: len(run.records("step")) >= QUIET_STEPS)
        (run.control / "compete-1").touch()
        run.until(lambda: (run.control / "competing-1").exists())
        run.until(lambda: [r for r in run.records("straggler") if r["by"] == "device"])
        began = float((run.control / "competing-1").read_text())
        found = next(r for r in run.records("straggler") if r["by"] == "device")
        after = [r for r in run.records("step") if r["begin"] > began and r["t"] < found["t"]]
        print(f"\n{in_words(found)}; {len(after)} steps after it began")
        assert found["rank"] == 1
        assert found["t"] > began, "it was named before anybody was slow"
        assert len(after) <= WITHIN or found["t"] - began < 6.0  # s: very short steps
    finally:
        run.end()
