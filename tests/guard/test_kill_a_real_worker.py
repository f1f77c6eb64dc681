"""The promise, whole: a real worker of a real run is killed with -9 and the result is bit for bit the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.guard.fake import alive, until
from tests.patience import limit
from tests.train.tiny import train_on

from shoal.data.index import write_index
from shoal.data.writer import ShardWriter
from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.spec import load

STEPS = 60
pytestmark = pytest.mark.usefixtures("warm_starts")  # test_drill.py kills one that was executed
RUN = f"""
name: NAME
model: {{dim: 32, layers: 1, heads: 2}}
data: {{train: data, seq_len: 32}}
train: {{steps: {STEPS}, batch: 4}}
checkpoint: {{every: 10}}
resources: {{processes: 2, device: cpu, threads: 1}}
track: {{mlflow: false}}
guard: {{backoff_s: 0.1}}
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Two run files that differ in nothing but the name, over documents of unlike lengths."""
    random = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    writer = ShardWriter(tmp_path / "data", "shard-00000", "uint16")
    for _ in range(200):
        writer.add(np.append(random.integers(97, 123, size=random.integers(20, 200)), 256))
    write_index(tmp_path / "data", [writer.close()], vocab_size=257, eos_id=256, tokenizer="byte")
    for name in ("calm", "killed"):
        (tmp_path / f"{name}.yaml").write_text(RUN.replace("NAME", name))
    return tmp_path


def start(workspace: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shoal", "train", f"{name}.yaml"]
    return subprocess.Popen(command, cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def told(workspace: Path, name: str, kind: str) -> list[Record]:
    path = RunDir.of(name, workspace).journal_file
    return [r for r in records(path) if r["kind"] == kind] if path.exists() else []


def test_a_run_whose_worker_is_killed_ends_by_itself_with_the_same_parameters(workspace: Path) -> None:
    process = start(workspace, "killed")
    until(lambda: len(told(workspace, "killed", "step")) >= 25, within_s=240)
    pids = told(workspace, "killed", "attempt")[0]["pids"]
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=limit(240))
    assert process.returncode == 0, output
    assert not any(map(alive, pids))

    (failure,) = told(workspace, "killed", "failure")
    assert (failure["rank"], failure["cause"], failure["signal"]) == (1, "killed", "SIGKILL")
    first, second = told(workspace, "killed", "start")
    assert (first["step"], second["attempt"]) == (0, 1)
    assert second["step"] >= 10, "a busy machine may still have been writing the second one"

    train_on(load(workspace / "calm.yaml").run, workspace, 2)  # by the same worker, which nobody watches
    digests = {told(workspace, name, "finished")[-1]["digest"] for name in ("calm", "killed")}
    assert len(digests) == 1

    # The steps that were taken twice gave the same numbers twice, and those of the undisturbed run.
    losses: dict[int, set[float]] = {}
    for name in ("calm", "killed"):
        for record in told(workspace, name, "step"):
            losses.setdefault(record["step"], set()).add(record["loss"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in losses.values())
