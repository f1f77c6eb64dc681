"""A launcher of the user's own starts, shows and stops a run; nobody's job file makes a verb import anything else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import WRONG_ENVIRONMENT, WRONG_USAGE, SetupError, SpecError
from shoal.journal.rundir import RunDir
from shoal.launch.backend import backend_of
from shoal.launch.job import Job, launched, remember
from shoal.launch.own import launcher, note
from shoal.spec import load

CODE = '''
import time
from pathlib import Path

from shoal.launch.backend import Rendered, State
from shoal.launch.job import Job

CARDS = Path(__file__).parent


class Board:
    """Cards on a board: a scheduler that starts nothing."""

    def render(self, request):
        return [Rendered("card.txt", " ".join(request.agent("CODE")) + "\\n")]

    def submit(self, request):
        id = f"card-{len(list(CARDS.glob('card-*')))}"
        (CARDS / id).write_text("waiting")
        launch = request.launch
        return Job(
            request.name, "board", id, time.time(), launch.nodes, launch.gpus, request.there, request.bundle.sha256
        )

    def states(self, jobs):
        return {job.id: State((CARDS / job.id).read_text(), "the card says so") for job in jobs}

    def logs(self, job, follow, lines):
        yield f"[0] {job.id} is on the board"

    def stop(self, job, now):
        (CARDS / job.id).write_text("stopped")


class Odd(Board):
    def submit(self, request):
        return "sent"

    def states(self, jobs):
        return {job.id: 1 / 0 for job in jobs}


class Lacks:
    def render(self, request):
        return []
'''
FILE = """name: boarded
model: {dim: 32, layers: 2, heads: 4, vocab_size: 128}
data: {train: data, seq_len: 32}
train: {steps: 5, batch: 4}
own: {launcher: 'cards:Board'}
resources: {device: cpu}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "cards.py").write_text(CODE)
    (folder / "run.yaml").write_text(FILE)
    return folder / "run.yaml"


def test_the_verbs_go_through_the_launcher_of_the_run(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--workspace", str(tmp_path)]

    def said(*words: str) -> str:
        assert main([*words, *there]) == 0
        return capsys.readouterr().out

    assert "-m shoal.launch.agent CODE/run.yaml" in said("launch", str(file), "--render")
    assert "sent run boarded to cards:Board card-0: 1 node of 1 process" in said("launch", str(file))
    job = launched("boarded", tmp_path)
    assert job is not None
    assert (job.backend, job.where) == ("cards:Board", {"own.folder": str(file.parent)})
    row = json.loads(said("ps", "--json"))[0]
    assert (row["phase"], row["on"], row["scheduler"]) == ("waiting", "cards:Board", "the card says so")
    assert "[0] card-0 is on the board" in said("logs", "boarded")
    assert "boarded" in said("stop", "boarded")
    assert (file.parent / "card-0").read_text() == "stopped"
    assert "sent run boarded to cards:Board card-1" in said("resume", "boarded")


def test_a_job_of_somebody_else_imports_nothing(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "cards.py").write_text("raise SystemExit('imported')\n")
    for name, where in (
        ("cards:Board", {"own.folder": str(file.parent)}),
        ("os:abort", {}),
        ("os:abort", {"own.folder": ""}),
    ):
        job = Job("boarded", name, "1", 1.0, 1, 0, str(tmp_path), "x", where)
        remember(job, RunDir.of("boarded", tmp_path))
        assert main(["ps", "--json", "--workspace", str(tmp_path)]) == 0
        row = json.loads(capsys.readouterr().out)[0]
        assert row["phase"] == "unknown"
        assert "is not one that you have launched with, and its code is not run unasked" in row["scheduler"]
        for verb in ("stop", "logs", "resume"):
            (tmp_path / "runs/boarded/job.yaml").write_text(FILE)
            assert main([verb, "boarded", "--workspace", str(tmp_path)]) == WRONG_ENVIRONMENT
            assert "is not one that you have launched with" in capsys.readouterr().err


def test_only_the_folder_that_was_launched_with_is_known(file: Path, tmp_path: Path) -> None:
    run = load(file).run
    note(run)
    note(run)
    assert json.loads((tmp_path / "config/shoal/launchers.json").read_text()) == [["cards:Board", str(file.parent)]]
    assert backend_of(run).name == "cards:Board"
    assert sys.path[-1] == str(file.parent)  # a file `yaml.py` in it does not come before the real one
    for name, folder in (("cards:Board", str(tmp_path)), ("cards:Odd", str(file.parent))):
        with pytest.raises(SetupError, match="not one that you have launched with"):
            launcher(name, folder)


def test_what_it_does_wrong_is_one_sentence_that_shows_its_line(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--workspace", str(tmp_path)]
    assert main(["launch", str(file), "own.launcher=cards:Lacks", *there]) == WRONG_ENVIRONMENT
    assert "own.launcher cards:Lacks has no submit(): it needs render, submit" in capsys.readouterr().err
    assert main(["launch", str(file), "own.launcher=cards:Boards", *there]) == WRONG_USAGE
    assert "cards has no `Boards`; there is `Board`" in capsys.readouterr().err
    assert main(["launch", str(file), "own.launcher=cards:Odd", *there]) == WRONG_ENVIRONMENT
    assert "submit() gave str where a shoal.launch.job.Job is needed" in capsys.readouterr().err
    line = CODE.splitlines().index("        return {job.id: 1 / 0 for job in jobs}") + 1
    job = Job("boarded", "cards:Odd", "1", 1.0, 1, 0, str(tmp_path), "x", {"own.folder": str(file.parent)})
    remember(job, RunDir.of("boarded", tmp_path))
    assert main(["ps", "--json", *there]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert f"states failed: cards.py:{line}: ZeroDivisionError" in row["scheduler"]


def test_what_it_does_not_go_together_with_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecError, match=r"launch\.on slurm has no effect with own\.launcher cards:Board"):
        load(file, ["launch.on=slurm"])
    sweep = ["sweep", str(file), "--grid", "seed=1,2", "--workspace", str(tmp_path)]
    assert main(sweep) == WRONG_USAGE
    assert "a sweep is not sent by own.launcher cards:Board" in capsys.readouterr().err


def test_who_trains_never_imports_it(file: Path) -> None:
    run = load(file).run
    assert run.own.objects == {}
    assert run.own.modules == []
    assert run.own.folder == str(file.parent)
