"""The verbs on a real Slurm: sent, seen, followed, stopped, resumed; a sweep as an array, its worse half stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.clusters.slurm import Missing, slurm
from tests.guard.fake import until
from tests.require import unavailable
from tests.train.tiny import digest_of, make_data, make_run, steps_of

from shoal.cli.main import main
from shoal.journal.rundir import RunDir
from shoal.launch.backend import backend
from shoal.launch.job import remembered
from shoal.spec import dump

pytestmark = [pytest.mark.cluster, pytest.mark.uses("slurm")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    try:
        with pytest.MonkeyPatch.context() as patch, slurm(tmp_path_factory.mktemp("slurm")) as found:
            for name, value in found.environment.items():
                patch.setenv(name, value)
            yield
    except Missing as e:
        unavailable("slurm", str(e))


@pytest.fixture
def folder(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    spec = {"train.steps": 200, "checkpoint.every": 100, "guard.grace_s": 10}
    (tmp_path / "run.yaml").write_text(dump(make_run(make_data(tmp_path / "data"), **spec)))
    yield tmp_path
    for run_dir in map(RunDir, (tmp_path / "runs").glob("*")):
        if job := remembered(run_dir):
            backend("slurm").stop(job, now=True)


def test_sent_seen_stopped_and_resumed_it_ends_with_the_same_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "run.yaml", "--name", "calm", "--on", "slurm", "--follow"]) == 0
    assert "done: all 200 steps are done" in capsys.readouterr().out
    assert main(["launch", "run.yaml", "--name", "rough", "--on", "slurm"]) == 0
    assert main(["launch", "run.yaml", "--name", "rough", "--on", "slurm"]) == 2
    assert "run 'rough' is " in capsys.readouterr().err
    rough = RunDir.of("rough", folder)
    until(lambda: rough.exists() and len(steps_of(rough)) > 5, within_s=120)
    assert main(["ps", "--json"]) == 0
    seen = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (seen["calm"]["status"], seen["calm"]["on"]) == ("finished", "slurm")
    assert seen["rough"]["status"] == "running"
    assert seen["rough"]["why"].startswith("training")
    assert main(["stop", "rough"]) == 0
    assert "saved at step" in capsys.readouterr().out
    assert main(["ps", "rough"]) == 0
    now, died, cost = capsys.readouterr().out.splitlines()
    assert now.startswith("now        stopped on slurm ")
    assert died.endswith("(docs/runbooks/preempted.md)")
    assert "node-hours" in cost
    assert main(["resume", "rough"]) == 0
    assert main(["logs", "-f", "rough"]) == 0
    assert digest_of(rough) == digest_of(RunDir.of("calm", folder))


def test_what_can_never_start_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "run.yaml", "--name", "huge", "--on", "slurm", "launch.nodes=400"]) == 0
    capsys.readouterr()
    assert main(["ps", "huge"]) == 0
    now = capsys.readouterr().out.splitlines()[0]
    assert now.startswith("now        waiting on slurm ")
    assert "nodes" in now
    assert now.endswith("(docs/runbooks/pending.md)")
    assert main(["stop", "huge"]) == 0
    assert main(["resume", "huge", "launch.nodes=1", "train.steps=5"]) == 0
    assert main(["logs", "-f", "huge"]) == 0
    assert "done: all 5 steps are done" in capsys.readouterr().out


def test_a_sweep_is_one_array_and_its_worse_half_is_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = "train.optimizer.lr=3e-3,1e-2,1e-6,1e-7"
    asked = ["sweep", "run.yaml", "--name", "s", "--on", "slurm", "--grid", rates, "--stop-early", "--json"]
    assert main([*asked, "train.steps=400"]) == 0
    out, err = capsys.readouterr()
    assert "sent 4 runs to slurm as an array" in err
    rows = json.loads(out)
    assert {row["on"].split("_")[0] for row in rows} == {rows[0]["on"].split("_")[0]}
    assert {row["status"] for row in rows} == {"finished", "stopped early"}
    assert rows[0]["status"] == "finished"
    assert {row["run"] for row in rows[2:]} == {"s-002", "s-003"}
