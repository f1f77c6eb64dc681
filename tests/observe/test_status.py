"""What `shoal ps` says of a run: its state, and one plain sentence why."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal import readable
from shoal.cli.main import main
from shoal.guard.history import History
from shoal.journal.rundir import RunDir
from shoal.journal.suggested import command
from shoal.observe.status import status_of, total_steps
from tests.journal.journals import Story, crash_and_finish, loss_at, make_run


@contextmanager
def supervised(run_dir: RunDir) -> Iterator[None]:
    """A real process that holds the run's lock, as its supervisor does."""
    code = (
        "import fcntl, json, os, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "json.dump({'pid': os.getpid(), 'host': 'box', 'started': 0}, f)\n"
        "f.flush(); print('', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run_dir.pid_file)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        yield
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_each_state_has_its_name_and_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = crash_and_finish(make_run(tmp_path, "done"))
    assert status_of(done.run_dir).status == "finished"
    assert status_of(done.run_dir).why == "200 steps are done"

    stopped = make_run(tmp_path, "stopped").open().start().steps(9).close("stopped", 143, "told to stop by SIGINT.")
    assert status_of(stopped.run_dir).status == "stopped"
    assert status_of(stopped.run_dir).why == "told to stop by SIGINT; `shoal resume stopped` goes on"

    failed = make_run(tmp_path, "failed").open().start().steps(9).failure().close("failed", 78, "the data is gone")
    failed.write("warning", text="the tracker is slow")
    assert status_of(failed.run_dir).status == "failed"
    why = status_of(failed.run_dir).why
    assert why == "the data is gone; fix the cause (docs/runbooks), then `shoal resume failed`"


def test_a_suggested_command_works_where_the_reader_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path / "my runs").run_dir
    elsewhere = f"`shoal resume demo --workspace '{tmp_path}/my runs'`"
    monkeypatch.delenv("SHOAL_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert command("resume", run_dir) == elsewhere
    monkeypatch.setenv("SHOAL_WORKSPACE", "my runs")
    assert command("resume", run_dir) == "`shoal resume demo`"
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path / "my runs")
    assert command("resume", run_dir) == elsewhere


def test_a_live_run_says_what_it_is_doing_and_a_dead_one_that_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    story = make_run(tmp_path).open()
    with supervised(story.run_dir):
        assert (status_of(story.run_dir).status, status_of(story.run_dir).why) == ("running", "starting")
        story.start().steps(120)
        now = status_of(story.run_dir, now=story.t + 1)
        assert (now.status, now.step, now.total) == ("running", 120, 200)
        assert now.why == "training, 40.0 s left"
        assert now.tokens_per_s == pytest.approx(4096, rel=1e-3)
        assert "no step for 5 m 00 s" in status_of(story.run_dir, now=story.t + 300).why
        story.failure()
        assert status_of(story.run_dir, now=story.t).why.startswith("recovering: rank 1: killed")
        story.start(at_step=100)
        assert status_of(story.run_dir, now=story.t).why.startswith("recovering: rank 1: killed")
        story.steps(110)
        assert status_of(story.run_dir, now=story.t).why.startswith("training")
        story.write("stopping", signal="SIGTERM")
        assert status_of(story.run_dir, now=story.t).why == "told to stop (SIGTERM); saving the state"
    dead = status_of(story.run_dir, now=story.t + 180)
    assert dead.status == "dead"
    assert "on box) went away without a word 3 m 00 s ago, at step 110; `shoal resume demo` goes on" in dead.why


def test_a_run_without_a_supervisor_is_judged_by_its_silence(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(5)  # torchrun: there is no lock file
    assert status_of(story.run_dir, now=story.t + 10).status == "running"
    assert status_of(story.run_dir, now=story.t + 1000).status == "dead"


def test_the_number_of_steps_is_found_in_any_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert total_steps(file) is None
    file.write_text("name: x\nschedule:\n  steps: 7\ntrain:\n  schedule:\n    steps: 8\n  batch: 2\n  steps: 55\n")
    assert total_steps(file) == 55
    file.write_text("train: {steps: 66}\n")
    assert total_steps(file) == 66
    file.write_text("- nonsense\n")
    assert total_steps(file) is None


def test_a_thousand_runs_are_listed_in_a_few_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = crash_and_finish(make_run(tmp_path, "run-0000"))
    journal, spec = first.run_dir.journal_file.read_bytes(), first.run_dir.spec_file.read_bytes()
    for i in range(1, 1000):
        folder = tmp_path / "runs" / f"run-{i:04d}"
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(journal)
        (folder / "run.yaml").write_bytes(spec)
    began = time.process_time()  # of this process, whatever else the machine does
    assert main(["ps", "--json", "--workspace", str(tmp_path)]) == 0
    took_s = time.process_time() - began
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 1000
    assert {s["status"] for s in found} == {"finished"}
    assert took_s < 5  # 0.4 s on an idle machine
    print(f"{took_s:.2f} s")


def test_ps_is_a_table_with_the_newest_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--workspace", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out
    crash_and_finish(make_run(tmp_path, "b-first"))
    second: Story = make_run(tmp_path, "a-second")
    second.wait(1000)
    crash_and_finish(second)
    assert main(["ps", "--workspace", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "STATUS", "STEP", "LOSS", "TOKENS/S", "AGE", "WHY"]
    assert [line.split()[0] for line in lines[1:]] == ["b-first", "a-second"]
    assert "200/200" in lines[1]
    assert "200 steps are done" in lines[1]


@pytest.mark.parametrize(
    ("why", "short"),
    [
        ("200 steps are done", "200 steps are done"),
        ("told to stop (SIGTERM); saved at step 3; `shoal resume demo` goes on", "told to stop (SIGTERM)"),
        (
            "rank 0 failed (numerics): step 2 has loss 5.768 and gradient norm nan, so no update was made: lower "
            "train.optimizer.lr, lengthen train.schedule.warmup_steps, then resume the run; fix the cause",
            "rank 0 failed (numerics): step 2 has loss 5.768 and gradient norm nan",
        ),
    ],
)
def test_the_first_clause_of_a_cause_is_enough_for_a_table(why: str, short: str) -> None:
    assert readable.clause(why) == short


def test_ps_sorts_by_what_is_asked_for_with_the_unknown_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "b").open().start().steps(9).close("done", 0, "done")
    make_run(tmp_path, "a").open().start().steps(5, loss_shift=-1.0).close("done", 0, "done")
    make_run(tmp_path, "c").open().start()

    def listed(*options: str) -> str:
        assert main(["ps", "--json", "--workspace", str(tmp_path), *options]) == 0
        return "".join(run["name"] for run in json.loads(capsys.readouterr().out))

    assert listed("--sort", "name") == "abc"
    assert listed("--sort", "loss") == "abc"
    assert listed("--sort", "step") == "cab"
    assert listed("--sort", "step", "--reverse") == "bac"
    assert main(["ps", "--sort", "price"]) == 2


def test_a_long_why_is_one_short_line_and_whole_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path).open().start().steps(9).close("failed", 75, "why " * 50 + "END")
    assert main(["ps", "--workspace", str(tmp_path)]) == 0
    row, advice = capsys.readouterr().out.splitlines()[1:]
    assert row.endswith("why why…")
    assert len(row) < 150
    assert "`shoal ps NAME` says why" in advice
    assert main(["ps", "--json", "--workspace", str(tmp_path)]) == 0
    assert "END; `shoal resume demo" in json.loads(capsys.readouterr().out)[0]["why"]
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["ps", "--workspace", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert len(row) == 90
    assert row.endswith("…")


def test_a_loss_that_is_no_number_is_still_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = make_run(tmp_path).open().start().steps(2)
    with open(story.run_dir.journal_file, "a") as f:
        f.write(json.dumps({**story.records[-1], "loss": "nan"}) + "\n")
    assert main(["ps", "--json", "--workspace", str(tmp_path)]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert found["loss"] == "nan"


def test_a_run_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crash_and_finish(make_run(tmp_path, "good"))
    newer = make_run(tmp_path, "newer").run_dir
    newer.journal_file.write_text(json.dumps({"v": 99, "kind": "open", "t": 0}) + "\n")
    empty = make_run(tmp_path, "empty").run_dir
    empty.journal_file.touch()
    assert main(["ps", "--json", "--workspace", str(tmp_path)]) == 0
    found = {s["name"]: s for s in json.loads(capsys.readouterr().out)}
    assert found["good"]["status"] == "finished"
    assert found["newer"]["status"] == "damaged"
    assert "upgrade Shoal" in found["newer"]["why"]
    assert found["empty"]["status"] == "running"  # it was made this moment and has said nothing yet


def test_one_that_fell_back_stands_at_the_older_step(tmp_path: Path) -> None:
    """The newest checkpoint was bad, and it was told to stop before it had made up for the steps."""
    story = make_run(tmp_path).open().start().steps(40).failure().start(32)
    status = status_of(story.run_dir)
    assert (status.step, round(status.loss or 0, 4)) == (32, round(loss_at(32), 4))
    history = History.of(story.run_dir)
    assert (history.at, history.step) == (32, 40)  # steps that are done again are no progress
    story.steps(35).write("rewind", attempt=1, step=35, to=30, begin=story.t, batches=[31, 35], why="spike")
    history.refresh()
    assert (status_of(story.run_dir).step, history.at, history.step) == (30, 30, 40)
    story.steps(36).close("stopped", 143, "told to stop (SIGTERM); saved at step 36")
    assert status_of(story.run_dir).step == 36
