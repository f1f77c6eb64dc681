"""Islands through `shoal train`: real agents, a worker killed, the supervisor killed, and `shoal stop` all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.patience import until
from tests.train.tiny import make_data, make_run

from shoal.cli.main import main
from shoal.guard.orphans import agents_of
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.spec import dump

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run of two islands that goes on for as long as it is left alone."""
    changes = {"train.steps": 100_000, "fleet.islands": 2, "checkpoint.every": 0, "resources.processes": 1}
    (tmp_path / "run.yaml").write_text(dump(make_run(make_data(tmp_path / "data"), **changes)))
    command = [sys.executable, "-m", "shoal", "train", "run.yaml"]
    with open(tmp_path / "out.txt", "w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out)
    run_dir = RunDir.of("tiny", tmp_path)
    try:
        yield run_dir
    finally:
        process.kill()
        process.wait()
        for pid in agents_of(run_dir):
            os.kill(pid, signal.SIGKILL)


def told(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [r for r in records(run_dir.journal_file) if r["kind"] == kind] if run_dir.journal_file.exists() else []


def more_steps(run_dir: RunDir, count: int = 20) -> None:
    now = len(told(run_dir, "step"))
    until(lambda: len(told(run_dir, "step")) >= now + count, 120)


def test_a_killed_worker_comes_back_and_the_others_go_on(run: RunDir) -> None:
    more_steps(run)
    os.kill(told(run, "island")[-1]["pids"][0], signal.SIGKILL)
    victim = told(run, "island")[-1]["island"]
    until(lambda: any(victim in r["joined"] for r in told(run, "epoch")[1:]), 120)
    more_steps(run)
    failure = told(run, "failure")[0]
    assert (failure["island"], failure["cause"]) == (victim, "killed")
    steps = [r["step"] for r in told(run, "step")]
    assert steps == list(range(1, len(steps) + 1))  # none was lost or taken twice
    assert main(["stop", "tiny", "--workspace", str(run.workspace)]) == 0
    assert told(run, "close")[0]["exit_code"] == 143
    assert told(run, "checkpoint")[-1]["step"] == told(run, "step")[-1]["step"]


def test_the_death_of_the_supervisor_is_survived(run: RunDir) -> None:
    more_steps(run)
    os.kill(told(run, "open")[0]["pid"], signal.SIGKILL)
    more_steps(run, 40)
    assert len(agents_of(run)) == 2
    assert main(["stop", "tiny", "--workspace", str(run.workspace)]) == 0
    assert not agents_of(run)
    assert told(run, "checkpoint")[-1]["step"] == told(run, "step")[-1]["step"]
    (close,) = told(run, "close")  # by the last agent, since nobody else was left to say so
    assert (close["status"], close["exit_code"]) == ("stopped", 143)
    assert len(told(run, "ended")) == 2
