"""`shoal launch` and what follows it (`ps`, `logs`, `stop`, `resume`), on this machine, with agents that pretend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.journal.journals import make_run
from tests.launch.stand_in import ended, pretend
from tests.train.tiny import make_data

from shoal.cli import launch
from shoal.cli.main import main
from shoal.journal.rundir import RunDir
from shoal.launch.backend import Rendered
from shoal.launch.job import remembered
from shoal.launch.local import Local

FILE = """\
name: demo
model: {dim: 32, layers: 2, heads: 4}
data: {train: data, seq_len: 32}
train: {steps: 200, batch: 16}
guard: {grace_s: 5}
track: {mlflow: false}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workspace with a run file; whatever was launched in it is ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_WORKSPACE", raising=False)
    make_data(tmp_path / "data", documents=4)
    (tmp_path / "demo.yaml").write_text(FILE)
    pretend(monkeypatch)
    yield tmp_path
    for run_dir in map(RunDir, (tmp_path / "runs").glob("*")):
        if job := remembered(run_dir):
            Local().stop(job, now=True)
            ended(job)


def test_sent_seen_refused_twice_followed_and_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "demo.yaml"]) == 0
    sent, how, stop = capsys.readouterr().out.splitlines()
    assert sent.startswith("sent run demo to local: 1 node of 1 process, bundle ")
    assert "`shoal logs -f demo`" in how
    assert stop == "`shoal stop demo` saves and ends it"

    assert main(["ps"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["demo", "running", "local"]
    assert main(["launch", "demo.yaml"]) == 2
    assert "run 'demo' is running on local (pid " in capsys.readouterr().err

    assert main(["stop", "demo"]) == 0
    assert capsys.readouterr().out == "run demo: it was told to stop.\n"
    assert main(["stop", "demo"]) == 0
    assert "not running: it was told to stop" in capsys.readouterr().out
    assert main(["logs", "-f", "demo"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "[0] told"
    assert "stopped: it was told to stop" in err


def test_resume_sends_it_again_with_what_may_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN", "143")
    assert main(["launch", "demo.yaml", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    job = remembered(RunDir.of("demo", folder))
    assert job is not None
    ended(job)
    assert main(["resume", "demo", "train.batch=8"]) == 2
    assert "would break the history" in capsys.readouterr().err
    monkeypatch.setenv("STAND_IN", "0")
    assert main(["resume", "demo", "train.steps=300", "launch.nodes=2"]) == 0
    assert "sent run demo to local: 2 nodes" in capsys.readouterr().out
    again = remembered(RunDir.of("demo", folder))
    assert again is not None
    assert (again.nodes, again.id != first["id"], again.bundle != first["bundle"]) == (2, True, True)
    assert ended(again) == "done"


def test_follow_leaves_as_the_run_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "78")
    assert main(["launch", "demo.yaml", "--follow"]) == 78


def test_another_run_of_that_name_is_refused_but_not_another_place_for_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = make_run(folder, "demo").open().start().steps(9)
    story.close("stopped", 143, "told to stop")
    assert main(["launch", "demo.yaml"]) == 2
    err = capsys.readouterr().err
    assert "run 'demo' exists with another spec: seed was 7, now 0" in err
    assert "--fresh" not in err
    assert main(["launch", str(story.run_dir.spec_file), "--render", "launch.nodes=2", "launch.workspace=/there"]) == 0
    assert "cd /there/.shoal/local/demo" in capsys.readouterr().out
    story.open().close("done", 0, "all 200 steps are done")
    assert main(["launch", str(story.run_dir.spec_file), "launch.workspace=/there"]) == 0
    assert "run demo is finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["data.train=nowhere"], 78, "which does not exist"),
        (["launch.min_nodes=3"], 2, "launch.min_nodes 3 is more than launch.nodes 1"),
        (["launch.on=moon"], 2, "launch.on"),
        (["launch.code=nowhere"], 2, "which is not a folder"),
        (["launch.gpus=2", "resources.device=cpu"], 2, "change one"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_leaves_no_trace(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert main(["launch", "demo.yaml", *arguments]) == code
    assert says in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_rendering_sends_nothing_and_names_the_parts_where_there_are_several(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "demo.yaml", "--render"]) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash\n")
    assert not (folder / "runs").exists()
    assert not (folder / ".shoal").exists()
    both = launch.rendered([Rendered("a.yaml", "a: 1\n"), Rendered("b.yaml", "b: 2")])
    assert both == "# --- a.yaml\na: 1\n# --- b.yaml\nb: 2\n"
