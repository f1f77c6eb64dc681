"""A script is launched as any run is: by the same file, with its folder brought along, restarted and resumed there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.guard.fake import until
from tests.launch.stand_in import ended

from shoal.cli.main import main
from shoal.errors import SpecError
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.launch.job import remembered
from shoal.launch.local import Local

SCRIPT = """\
import json, os, sys, time
from pathlib import Path
import beside

kept = Path(sys.argv[1])
started = len(list(kept.glob("started-*")))
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
about = {"file": __file__, "cwd": os.getcwd(), "beside": beside.__file__} | {name: os.environ[name] for name in names}
(kept / f"started-{started}-{os.environ['RANK']}").write_text(json.dumps(about))
print("it is under way", flush=True)
if (kept / "wait").exists():
    while True:
        time.sleep(0.05)
sys.exit(7 if started < 2 else 0)
"""
Send = Callable[..., int]


@pytest.fixture
def send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Send]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    (tmp_path / "kept").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(SCRIPT)
    (tmp_path / "mine" / "beside.py").write_text("")

    def sent(*more: str, **launch: Any) -> int:
        script = {"path": "mine/train.py", "args": [str(tmp_path / "kept")], "processes": 2, "probe": False}
        guard = {"backoff_s": 0.01, "restarts": 3}
        run = {"name": "mine", "script": script, "launch": launch, "guard": guard, "track": {"mlflow": False}}
        (tmp_path / "run.yaml").write_text(json.dumps(run))
        return main(["launch", "run.yaml", *more])

    yield sent
    for run_dir in map(RunDir, (tmp_path / "runs").glob("*")):
        if job := remembered(run_dir):
            Local().stop(job, now=True)
            ended(job)


def started(folder: Path) -> list[dict[str, str]]:
    return [json.loads(file.read_text()) for file in sorted((folder / "kept").glob("started-*"))]


def test_it_runs_where_it_was_sent_from_and_is_restarted_there(
    send: Send, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert send("--follow") == 0
    assert "it is under way" in capsys.readouterr().out
    found = started(tmp_path)
    assert {(one["RANK"], one["WORLD_SIZE"]) for one in found} == {("0", "2"), ("1", "2")}
    assert {one["file"] for one in found} == {str(tmp_path / "mine" / "train.py")}
    assert {one["cwd"] for one in found} == {str(tmp_path)}
    assert {one["TORCHELASTIC_RUN_ID"] for one in found} == {"mine"}
    told = list(records(RunDir.of("mine", tmp_path).journal_file))
    assert [r["exit_code"] for r in told if r["kind"] == "failure"][:1] == [7]
    assert [r["status"] for r in told if r["kind"] == "close"] == ["done"]
    assert main(["launch", "run.yaml"]) == 0
    assert "run mine is finished" in capsys.readouterr().out


def test_its_folder_travels_where_the_node_sees_no_disk_of_ours(send: Send, tmp_path: Path) -> None:
    node = tmp_path / "node"
    node.mkdir()
    assert send("--follow", workspace=str(node), code="mine") == 0
    (of,) = {Path(one["file"]).parent for one in started(tmp_path)}
    assert of.is_relative_to(tmp_path)
    assert of != tmp_path / "mine"
    assert {(Path(one["cwd"]), Path(one["beside"]).parent) for one in started(tmp_path)} == {(of, of)}
    assert RunDir.of("mine", node).exists()


def test_it_is_stopped_and_goes_on(send: Send, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept" / "wait").touch()
    assert send() == 0
    until(lambda: len(list((tmp_path / "kept").glob("started-*"))) == 2)
    assert main(["stop", "mine"]) == 0
    (tmp_path / "kept" / "wait").unlink()
    capsys.readouterr()
    assert main(["resume", "mine"]) == 0
    assert main(["logs", "-f", "mine"]) == 0
    assert "it is under way" in capsys.readouterr().out


def test_it_is_swept(send: Send, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / "train.py").write_text("")
    script = {"path": "mine/train.py", "probe": False}
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "mine", "script": script, "track": {"mlflow": False}}))
    assert main(["sweep", "run.yaml", "--grid", "guard.restarts=1,2"]) == 0
    assert capsys.readouterr().out.count("the script has ended with exit code 0") == 2


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"nodes": 2}, "launch.nodes has no effect in a run that is a script: a script runs on one node"),
        ({"workspace": "/elsewhere"}, "the node may not see it; name a folder that holds it in launch.code"),
        ({"workspace": "/elsewhere", "code": "kept"}, "name a folder that holds it in launch.code"),
        ({"gpus": 4}, "script.processes is 2, but launch.nodes 1 with 4 processes each are 4; change one"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    send: Send, launch: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert send(**launch) == SpecError.exit_code
    assert says in capsys.readouterr().err
