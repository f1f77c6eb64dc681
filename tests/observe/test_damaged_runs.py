"""A damaged run directory is shown as such beside the good ones; asked for alone, it is one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.journal.rundir import RunDir
from shoal.track.cursor import Cursor
from tests.journal.journals import make_run


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    assert "defect" not in out + err
    return code, out + err


def test_a_journal_without_a_record_is_damaged_and_not_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("bad", "good"):
        make_run(tmp_path, name).open().start().steps(2).close()
    journal = RunDir.of("bad", tmp_path).journal_file
    journal.write_bytes(b"\0" * 50 + b"\nnonsense\n" + b"9" * 5000 + b"\n")
    where = ("--workspace", str(tmp_path))
    code, out = said(capsys, "ps", *where)
    assert code == 0
    assert "\ngood " in out
    assert "damaged: journal.jsonl: none of its lines is a record" in out
    for words in (("ps", "bad"), ("report", "bad", "--no-png")):
        code, out = said(capsys, *words, *where)
        assert (code, out.count("none of its lines is a record")) == (78, 1)
    journal.write_bytes(b'{"half": ')  # being written right now
    assert said(capsys, "ps", *where)[0] == 0


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "nowhere"])
def test_something_else_in_the_place_of_a_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for name in ("bad", "good"):
        make_run(tmp_path, name).open().start().steps(2).close()
    journal = RunDir.of("bad", tmp_path).journal_file
    journal.unlink()
    if kind == "fifo":
        os.mkfifo(journal)
    elif kind == "folder":
        journal.mkdir()
    else:
        journal.symlink_to(journal.name if kind == "loop" else "nowhere")
    where = ("--workspace", str(tmp_path))
    code, out = said(capsys, "ps", *where)
    assert code == 0
    assert "\ngood " in out
    assert "damaged: journal.jsonl: is a" in out
    for verb in ("ps", "report", "logs", "resume"):
        code, out = said(capsys, verb, "bad", *where)
        assert (code, "run 'bad' is damaged" in out) == (78, True)


def test_a_fifo_in_the_place_of_a_lock_a_log_or_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path, "demo").open().start().steps(8).close().run_dir
    log = run_dir.logs / "attempt-000" / "rank-00000.log"
    log.parent.mkdir(parents=True)
    for file in (run_dir.pid_file, run_dir.plan_file, run_dir.identity_file, log):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    where = ("--workspace", str(tmp_path))
    assert said(capsys, "ps", "demo", *where)[0] == 0
    assert said(capsys, "report", "demo", "--no-png", *where)[0] == 0
    code, out = said(capsys, "logs", "demo", *where)
    assert (code, "is a FIFO" in out) == (78, True)
    code, out = said(capsys, "resume", "demo", *where)
    assert (code, "is a FIFO" in out) == (78, True)


@pytest.mark.parametrize("plan", ['{"step_s": "x"}', '{"step_s": 0, "parts_s": []}', '{"none": [1]}', "[1]", "{"])
def test_a_damaged_plan_leaves_the_rest_of_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: str
) -> None:
    run_dir = make_run(tmp_path, "demo").open().start().steps(8).close().run_dir
    run_dir.plan_file.write_text(plan)
    run_dir.identity_file.write_text('{"git": 5, "data": [1], "seed": {}, "argv": 7}')
    code, out = said(capsys, "report", "demo", "--no-png", "--workspace", str(tmp_path))
    assert code == 0
    assert "plan.json is damaged" in out


def test_a_cursor_of_the_wrong_type_begins_again(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "demo").open().run_dir
    run_dir.track.mkdir()
    for text in ('{"address": "a", "offset": {}}', '{"address": "a", "offset": -1}', '{"address": "a", "remote": 5}'):
        (run_dir.track / "mlflow.json").write_text(text)
        assert Cursor.load(run_dir, "mlflow", "a").offset == 0
