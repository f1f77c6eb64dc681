"""`torchrun -m shoal.train` is the same run as `shoal train`, for those who have torchrun in their scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from shoal.spec import dump
from shoal.track import journal
from shoal.track.rundir import RunDir
from tests.train.tiny import losses_of, make_data, make_run, train_on


def test_torchrun_gives_the_same_curve_and_the_same_run_directory(tmp_path: Path) -> None:
    run = make_run(make_data(tmp_path / "data"), **{"train.steps": 6, "mesh.dp_shard": 2})
    (tmp_path / "run.yaml").write_text(dump(run))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shoal.train", "run.yaml", "name=by-torchrun", "train.steps=5"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert out.returncode == 0, out.stderr
    by_torchrun = RunDir.of("by-torchrun", tmp_path)
    ours = train_on(run, tmp_path, 2)
    assert len(losses_of(by_torchrun)) == 5
    # The schedule ends at another step, so only its beginning (warm-up) must be the same to the bit.
    assert np.array_equal(losses_of(by_torchrun)[:3], losses_of(ours)[:3])
    records = journal.records(by_torchrun.journal_file)
    assert [r["kind"] for r in records if r["kind"] in ("open", "attempt", "close")] == ["open", "attempt", "close"]
    assert records[-1]["status"] == "done"
    assert by_torchrun.identity_file.exists()


def test_without_torchrun_it_says_what_to_use(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "shoal.train", "run.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert out.returncode == 2
    assert out.stderr.strip().endswith("use `shoal train RUN.yaml`.")
