"""A launch over two "nodes" of this machine, with real agents and a real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.guard.fake import until
from tests.launch.stand_in import ended
from tests.train.tiny import digest_of, make_data, make_run, steps_of

from shoal.cli.main import main
from shoal.journal.rundir import RunDir
from shoal.launch.job import remembered
from shoal.launch.local import Local
from shoal.spec import dump


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    launch = {"nodes": 2, "env": {"OMP_NUM_THREADS": 1}}
    run = make_run(make_data(tmp_path / "data"), **{"train.steps": 40, "checkpoint.every": 10, "launch": launch})
    (tmp_path / "run.yaml").write_text(dump(run))
    yield tmp_path
    for run_dir in map(RunDir, (tmp_path / "runs").glob("*")):
        if job := remembered(run_dir):
            Local().stop(job, now=True)
            ended(job)


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_with_the_same_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "run.yaml", "--name", "calm", "--follow"]) == 0
    assert "2 processes" in capsys.readouterr().out
    assert main(["launch", "run.yaml", "--name", "rough"]) == 0
    rough = RunDir.of("rough", folder)
    until(lambda: rough.exists() and len(steps_of(rough)) > 5, within_s=120)
    assert main(["stop", "rough"]) == 0
    assert "told to stop (SIGTERM); saved at step" in capsys.readouterr().out
    assert main(["ps", "rough"]) == 0
    assert "(docs/runbooks/preempted.md)" in capsys.readouterr().out
    assert main(["resume", "rough"]) == 0
    assert main(["logs", "-f", "rough"]) == 0
    assert "done: all 40 steps are done" in capsys.readouterr().out
    assert digest_of(rough) == digest_of(RunDir.of("calm", folder))
