"""`torchrun -m shoal.train` is the same run as `shoal train`, for those who have torchrun in their scripts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from shoal.errors import WRONG_USAGE, SpecError
from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.spec import dump
from shoal.train import under_torchrun
from tests.patience import limit
from tests.train.tiny import losses_of, make_data, make_run, train_on


@pytest.mark.slow
def test_torchrun_gives_the_same_curve_and_the_same_run_directory(tmp_path: Path) -> None:
    run = make_run(make_data(tmp_path / "data"), **{"train.steps": 6, "mesh.dp_shard": 2})
    (tmp_path / "run.yaml").write_text(dump(run))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shoal.train", "run.yaml", "name=by-torchrun", "train.steps=5"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(200))
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


@pytest.mark.slow
def test_torchrun_restarts_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """The store of torchrun outlives the workers; those of the next start must not find the addresses of the dead."""
    changes = {"train.steps": 60, "checkpoint.every": 5, "data.seq_len": 128, "mesh.dp_shard": 2}
    run = make_run(make_data(tmp_path / "data"), **changes)
    (tmp_path / "run.yaml").write_text(dump(run))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "shoal.train", "run.yaml"]
    file = RunDir.of(run.name, tmp_path).journal_file

    def steps() -> int:
        return sum(r["kind"] == "step" for r in journal.records(file)) if file.exists() else 0

    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while steps() < 8 and process.poll() is None:
            time.sleep(0.05)
        psutil.Process(process.pid).children()[-1].kill()
        _, said = process.communicate(timeout=limit(200))
    assert process.returncode == 0, said
    starts = [r["resumed_from"] for r in journal.records(file) if r["kind"] == "start"]
    assert len(starts) == 2
    assert starts[1] >= 5


def test_without_torchrun_it_says_what_to_use(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "shoal.train", "run.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert out.returncode == 2
    assert out.stderr.strip().endswith("use `shoal train RUN.yaml`.")


def test_islands_are_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "data", **{"fleet.islands": 2, "fleet.shards": 2, "train.batch": 4})
    (tmp_path / "run.yaml").write_text(dump(run))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SpecError, match=r"^fleet.islands is 2, and torchrun starts one island"):
        under_torchrun.main([str(tmp_path / "run.yaml"), "--workspace", str(tmp_path)])
    assert not (tmp_path / "runs").exists()


def test_a_wrong_value_is_one_sentence_of_rank_0_with_which_torchruns_summary_ends(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump(make_run(tmp_path / "data")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = subprocess.run(
        [*command, "-m", "shoal.train", "run.yaml", "train.lora=8"], cwd=tmp_path, capture_output=True, text=True
    )
    sentence = "shoal: `train.lora=8` on the command line: train.lora is not a name of the run file; Shoal has no LoRA"
    ours, _, summary = out.stderr.partition("torch/distributed/elastic")
    assert ours.count(sentence) == 1
    assert "Traceback" not in ours
    _, _, root = summary.partition("Root Cause")
    assert f"rank      : 0 (local_rank: 0)\n  exitcode  : {WRONG_USAGE} " in root
    assert sentence in root
