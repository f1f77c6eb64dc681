"""`shoal track sync`: uploads what is left, says what it did, and its exit code tells whether all arrived."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.journal.journals import crash_and_finish, make_run
from tests.track.servers import closed_port


def test_one_run_or_all_but_not_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["demo", "--all"]):
        assert main(["track", "sync", *arguments, "--workspace", str(tmp_path)]) == 2
        assert "name one run, or say --all" in capsys.readouterr().err


def test_each_tracker_of_each_run_gets_a_line_and_a_failure_the_retry_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crash_and_finish(make_run(tmp_path, "good", mlflow=False, tensorboard=True))
    crash_and_finish(make_run(tmp_path, "none", mlflow=False))
    assert main(["track", "sync", "--all", "--workspace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"good: TensorBoard files in {tmp_path}/runs/good/tensorboard: everything is uploaded" in said
    assert "none: no tracker is switched on" in said

    broken = crash_and_finish(make_run(tmp_path, "broken")).run_dir
    broken.spec_file.write_text("name: broken\n")
    assert main(["track", "sync", "--all", "--workspace", str(tmp_path)]) == 75
    said = capsys.readouterr().out
    assert "broken: " in said
    assert "run.yaml" in said
    assert "good: TensorBoard" in said
    broken.journal_file.unlink()

    away = crash_and_finish(make_run(tmp_path, "away", mlflow=f"http://127.0.0.1:{closed_port()}"))
    before = away.run_dir.journal_file.read_bytes()
    assert main(["track", "sync", "--all", "--workspace", str(tmp_path)]) == 75
    assert "bytes are left: connection refused" in capsys.readouterr().out
    assert away.run_dir.journal_file.read_bytes() == before, "who types a command reads its output, not the journal"
