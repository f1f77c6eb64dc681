"""`script`: writes a script into a workspace and runs it there as a person would, in this process."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir

QUICK = ("track.mlflow=false", "guard.backoff_s=0.01")


class ScriptRun:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.run_dir = RunDir.of("demo", folder)
        self.out = self.err = ""

    def write(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text("import os, signal, sys, threading, time\n" + textwrap.dedent(text))
        return path

    def run(self, text: str, *options: str, args: tuple[str, ...] = ()) -> int:
        """The exit code; what was printed is in `out` and `err`."""
        return self.shoal("run", "--name", "demo", *QUICK, *options, str(self.write(text)), *args)

    def shoal(self, *words: str) -> int:
        code = main(list(words))
        self.out, self.err = self._capsys.readouterr()
        return code

    def records(self, kind: str) -> list[Record]:
        return [record for record in records(self.run_dir.journal_file) if record["kind"] == kind]

    def one(self, kind: str) -> Record:
        (found,) = self.records(kind)
        return found

    def log(self, attempt: int = 0, rank: int = 0) -> str:
        return (self.run_dir.logs / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log").read_text()

    def file(self, name: str) -> Any:
        return (self.folder / name).read_text()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[ScriptRun]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    return ScriptRun(tmp_path, capsys)
