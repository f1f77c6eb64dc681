"""What becomes of standard output never changes what a run does, nor its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.journal.journal import records
from tests.guard.supervisor import FAKE
from tests.train.tiny import make_data

SHOAL = [sys.executable, "-m", "shoal"]


def shell(command: str, folder: Path, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """`"$@"` in the command is the program."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONUNBUFFERED", "SHOAL_WORKSPACE")} | more
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}", "sh", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run file and its data; its workers are fake ones."""
    make_data(tmp_path / "data")
    (tmp_path / "demo.yaml").write_text(
        "name: demo\nmodel: {dim: 32, layers: 1, heads: 2}\ndata: {train: data, seq_len: 16}\n"
        "train: {steps: 4, batch: 4}\nresources: {processes: 1, device: cpu}\ntrack: {mlflow: false}\n"
    )
    (tmp_path / "demo.script.json").write_text(json.dumps({"steps": 4, "step_s": 0.002, "save_every": 2, "faults": []}))
    return tmp_path


def train(folder: Path) -> list[str]:
    code = (
        "import sys; from shoal.guard import supervise as s; from shoal.cli.main import main; "
        f"s.worker_command = lambda run_dir: [sys.executable, {str(FAKE)!r}, str(run_dir.path)]; "
        "sys.argv = ['shoal', 'train', 'demo.yaml']; main()"
    )
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    "command", ['"$@" >&- 2>&- <&-', '"$@" 2>&1 | true', '"$@" > /dev/full 2>&1'], ids=["closed", "no reader", "full"]
)
def test_a_run_whose_words_nobody_can_hear_is_done_and_says_so(folder: Path, command: str) -> None:
    done = shell(command, folder, train(folder))
    told = records(folder / "runs" / "demo" / "journal.jsonl")
    assert done.returncode == 0, done.stderr
    assert [r["status"] for r in told if r["kind"] == "close"] == ["done"]
    text = (folder / "runs" / "demo" / "journal.jsonl").read_text()
    assert all(line.startswith('{"v":1,"kind":') for line in text.splitlines())  # nothing was printed into it


@pytest.mark.parametrize("words", [["--help"], ["ps"]])
def test_a_view_without_a_reader_ends_quietly_and_one_that_is_not_written_says_so(
    folder: Path, words: list[str]
) -> None:
    for command in ('"$@" | true', '"$@" >&-'):
        done = shell(command, folder, [*SHOAL, *words])
        assert (done.returncode, done.stderr) == (0, ""), command
    done = shell('"$@" > /dev/full', folder, [*SHOAL, *words])
    assert (done.returncode, done.stderr.count("\n")) == (75, 1)
    assert "No space left on device" in done.stderr


def test_an_error_keeps_its_exit_code_when_nobody_can_hear_of_it(tmp_path: Path) -> None:
    for command in ('"$@" >&- 2>&-', '"$@" > /dev/full 2>&1'):
        assert shell(command, tmp_path, [*SHOAL, "train", "missing.yaml"]).returncode == 2


def test_a_file_opened_by_a_process_without_standard_output_is_not_printed_into(tmp_path: Path) -> None:
    code = (
        "from shoal.streams import steady; steady(); f = open('file', 'w'); print('x' * 99, flush=True); "
        "import subprocess; subprocess.run(['echo', 'y']); assert f.fileno() > 2"
    )
    done = shell('"$@" >&-', tmp_path, [sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == ""


def test_what_is_printed_comes_out_at_once_where_that_is_asked_for(tmp_path: Path) -> None:
    code = "from shoal.streams import steady; steady(); print('seen'); import os; os._exit(0)"
    assert shell('"$@"', tmp_path, [sys.executable, "-c", code], PYTHONUNBUFFERED="1").stdout == "seen\n"
