"""The journal and the run directory: what is written can be read, by anybody, whatever was cut off in between."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import SetupError, UsageError
from shoal.journal.journal import Journal, read, records
from shoal.journal.record import parse
from shoal.journal.rundir import RunDir, find_run, runs_in
from shoal.journal.tail import head, is_closed, newest_session_offset, tail
from shoal.masking import mask, mask_arguments
from tests.journal.journals import crash_and_finish, make_run
from tests.patience import limit


def test_records_come_back_in_order_with_offsets_to_go_on_from(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in range(3):
        journal.append("step", step=step, loss=1.5)
    offsets = [offset for _, offset in read(path)]
    journal.append("close", status="done")
    assert [r["kind"] for r, _ in read(path, offsets[-1])] == ["close"]
    assert [r["step"] for r in records(path)[:3]] == [0, 1, 2]


def test_a_loss_that_is_no_number_survives_as_words(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append("step", step=1, loss=float("nan"), grad_norm=float("inf"))
    assert (records(path)[0]["loss"], records(path)[0]["grad_norm"]) == ("nan", "inf")


def test_a_torn_line_costs_itself_and_nothing_after_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append("step", step=1)
    with open(path, "ab") as f:
        f.write(b'{"v":1,"kind":"st')
    assert [r["step"] for r in records(path)] == [1]
    Journal(path).append("step", step=2)
    assert [r["step"] for r in records(path)] == [1, 2]


def test_json_that_is_no_record_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"12\n\nnull\n[1]\n")
    Journal(path).append("step", step=1)
    assert [r["step"] for r in records(path)] == [1]


def test_a_newer_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps({"v": 99, "kind": "open", "t": 0}) + "\n")
    with pytest.raises(SetupError, match=r"newer Shoal \(journal version 99\); upgrade"):
        records(path)


def test_a_full_disk_is_an_error_and_the_next_record_is_whole(tmp_path: Path) -> None:
    """A file-size limit is how a process sees a full disk without filling one."""
    path = tmp_path / "journal.jsonl"
    code = f"""
import resource, signal
from pathlib import Path
from shoal.journal.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path({str(path)!r}))
journal.append("step", step=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (120, resource.RLIM_INFINITY))
try:
    journal.append("step", step=2, text="x" * 200)
except OSError as e:
    print("refused", e.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append("step", step=3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60))
    assert done.stdout.startswith("refused"), done.stderr
    assert [r["step"] for r in records(path)] == [1, 3]


def test_what_a_full_disk_does_not_take_is_written_when_it_does(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    code = f"""
import resource, signal
from pathlib import Path
from shoal.journal.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path({str(path)!r}))
journal.note("step", step=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (120, resource.RLIM_INFINITY))
for step in (2, 3, 4):
    journal.note("step", step=step, text="x" * 200)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.note("step", step=5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    found = records(path)
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5]
    assert [r["t"] for r in found] == sorted(r["t"] for r in found), (
        "each says when it happened, not when it was written"
    )


def test_two_processes_write_without_tearing_each_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    code = (
        "import sys; from pathlib import Path; from shoal.journal.journal import Journal\n"
        "j = Journal(Path(sys.argv[1]))\n"
        "for i in range(2000): j.append('step', who=sys.argv[2], step=i, pad='x' * (i % 500))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in "ab"]
    assert [w.wait(limit(60)) for w in writers] == [0, 0]
    for who in "ab":
        assert [r["step"] for r in records(path) if r["who"] == who] == list(range(2000))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://me:secret@host:5000/x", "http://***@host:5000/x"),
        ("http://me:p@ss@host/x", "http://***@host/x"),
        ("--track.mlflow=https://token@host", "--track.mlflow=https://***@host"),
        ("s3://b/k?X-Amz-Signature=abc&X-Amz-Date=1", "s3://b/k?X-Amz-Signature=***&X-Amz-Date=1"),
        ("https://h/?api_key=abc#x", "https://h/?api_key=***#x"),
        ("http://host/a@b", "http://host/a@b"),
        ("me@host: no address", "me@host: no address"),
        ("join shoal1eJyFkE1Pwz-AMh_3UySc now", "join shoal1*** now"),
        ("a run called shoal1", "a run called shoal1"),
        ("WANDB_API_KEY=0123456789", "WANDB_API_KEY=***"),
        ("--registry.password=hunter2", "--registry.password=***"),
        ("hf_abcdefghijklmnopqrstuv was refused", "hf_*** was refused"),
        ("tokens=123456 and pad_token=0", "tokens=123456 and pad_token=0"),
    ],
)
def test_secrets_are_masked(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_a_command_line_is_recorded_without_what_follows_a_secret_option() -> None:
    typed = ["shoal", "swarm", "join", "shoal1eJyFkE1Pwz-AMh_3UySc", "--token", "hunter2", "train.steps=3"]
    assert mask_arguments(typed) == ["shoal", "swarm", "join", "shoal1***", "--token", "***", "train.steps=3"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux keeps the command line in the process")
def test_a_hidden_argument_is_not_in_the_list_of_processes() -> None:
    code = (
        "import sys; from shoal.masking import hide_argument; hide_argument(sys.argv[1]); hide_argument('not there');"
        "print(open('/proc/self/cmdline', 'rb').read())"
    )
    shown = subprocess.check_output([sys.executable, "-c", code, "shoal1-the-invitation", "other"], text=True)
    assert "invitation" not in shown
    assert "*" * len("shoal1-the-invitation") in shown
    assert "other" in shown


def test_no_secret_reaches_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append(
        "open", argv=["shoal", "--track.mlflow=http://me:hunter2@host"], deep={"a": ["http://u:hunter2@h"]}
    )
    assert "hunter2" not in path.read_text()


def test_the_ends_of_a_journal_are_found_without_its_middle(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(60).close("stopped")
    first_close = story.run_dir.journal_file.stat().st_size
    path = story.run_dir.journal_file
    assert is_closed(path)
    story.wait(100).open(resumed=True).start().steps(120)
    assert not is_closed(path)
    for block_bytes in (64, 1000, 1 << 20):
        assert newest_session_offset(path, block_bytes) == first_close
    assert tail(path, 3000)[-1]["step"] == 120
    assert len(tail(path, 3000)) < 15
    assert (head(path) or {})["session"] == 0
    story.close()
    story.write("warning", text="the tracker is slow")
    assert is_closed(path)


def test_a_lock_that_dies_with_its_holder_tells_whether_a_supervisor_lives(tmp_path: Path) -> None:
    run_dir = crash_and_finish(make_run(tmp_path)).run_dir
    assert not run_dir.supervised()
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run_dir.pid_file)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert run_dir.supervised()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert not run_dir.supervised()
    with open(run_dir.pid_file) as f:  # asking does not keep the lock
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_is_found_by_name_and_by_path_and_a_typo_gets_a_hint(tmp_path: Path) -> None:
    run_dir = crash_and_finish(make_run(tmp_path, "tiny-llama")).run_dir
    (tmp_path / "runs" / "not-a-run").mkdir()
    assert find_run("tiny-llama", tmp_path) == run_dir
    assert find_run(f"{run_dir.path}{os.sep}", tmp_path / "elsewhere").path == run_dir.path
    assert runs_in(tmp_path) == [RunDir(run_dir.path)]
    with pytest.raises(UsageError, match="did you mean 'tiny-llama'"):
        find_run("tiny-lama", tmp_path)
    with pytest.raises(UsageError, match="there are no runs there yet"):
        find_run("x", tmp_path / "elsewhere")


def test_a_record_is_nested_no_deeper_than_a_view_can_show() -> None:
    """`report --json` writes it again, with an indent, and goes less deep than the parser of a newer Python."""
    deep = [b'{"kind": "failure", "t": 1.0, "exit_code": %b%b}' % (b"[" * n, b"]" * n) for n in (60, 64, 900)]
    assert [parse(line) is None for line in deep] == [False, True, True]
    assert parse(b'{"kind": "failure", "t": 1.0, "evidence": "%b"}' % (b"[" * 900)) is not None


@pytest.mark.parametrize("said", [{"params": "x"}, {"params": -1}, {"mesh": 3}])
def test_what_a_start_says_of_its_model_has_its_type(said: dict[str, object]) -> None:
    assert parse(json.dumps({"kind": "start", "t": 1.0, "params": 5, "mesh": {"dp": 2}}).encode()) is not None
    assert parse(json.dumps({"kind": "start", "t": 1.0, **said}).encode()) is None
