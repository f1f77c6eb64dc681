"""`shoal train`, `resume` and `stop` from the outside: what they say, what they write, how they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.guard.fake import alive, until
from tests.guard.supervisor import FAKE, fake_command
from tests.patience import limit

from shoal.cli.main import main
from shoal.data.index import write_index
from shoal.data.writer import ShardWriter
from shoal.guard import supervise as supervising
from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.spec import load

Plan = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with a small data set and a run file; workers are fake ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_WORKSPACE", raising=False)
    monkeypatch.setattr(supervising, "worker_command", lambda run_dir: fake_command(run_dir.path))
    data = tmp_path / "data"
    data.mkdir()
    writer = ShardWriter(data, "shard-00000", "uint16", False)
    writer.add([*range(200), 256])
    write_index(data, [writer.close()], dtype="uint16", vocab_size=257, eos_id=256, tokenizer="byte", source={})
    (tmp_path / "demo.yaml").write_text(
        "name: demo\nmodel: {dim: 32, layers: 1, heads: 2}\ndata: {train: data, seq_len: 16}\n"
        "train: {steps: 20, batch: 4}\nresources: {processes: 2, device: cpu}\ntrack: {mlflow: false}\n"
        "guard: {backoff_s: 0.01, grace_s: 10}\n"
    )
    plan(tmp_path)
    return tmp_path


def plan(folder: Path, *faults: Record, steps: int = 20, step_s: float = 0.002, name: str = "demo") -> None:
    """What the fake workers of a run do; kept beside the runs so that a fresh run finds it too."""
    told = {"steps": steps, "step_s": step_s, "save_every": 5, "faults": faults}
    (folder / f"{name}.script.json").write_text(json.dumps(told))


def told(folder: Path, kind: str, name: str = "demo") -> list[Record]:
    path = RunDir.of(name, folder).journal_file
    return [r for r in records(path) if r["kind"] == kind] if path.exists() else []


def test_train_makes_the_run_directory_and_finishes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo.yaml"]) == 0
    run_dir = RunDir.of("demo", folder)
    resolved = load(run_dir.spec_file).run
    assert resolved.resources.threads != "auto"
    assert resolved.model.vocab_size == 320
    about = json.loads(run_dir.identity_file.read_text())
    assert about["seed"] == 0
    assert list(about["data"].values()) == [json.loads((folder / "data/index.json").read_text())["fingerprint"]]
    opened = told(folder, "open")[0]
    assert (opened["session"], opened["resumed"]) == (0, False)
    decided = {d["key"]: d["why"] for d in told(folder, "decision")}
    assert "mesh.dp_replicate" in decided
    assert "resources.processes" not in decided  # that one was asked for
    out = capsys.readouterr().out
    assert "run demo done at step 20 of 20, loss 0.0500" in out
    assert "shoal report demo" in out
    assert str(run_dir.path) in out


def test_training_a_finished_run_again_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo.yaml"]) == 0
    capsys.readouterr()
    assert main(["train", "demo.yaml"]) == 0
    out = capsys.readouterr().out
    assert "run demo is finished: 20 steps" in out
    assert "`shoal resume demo train.steps=40 train.schedule.prolong=keep` trains on" in out
    assert main(["resume", "demo"]) == 0
    assert "`shoal resume demo train.steps=40 train.schedule.prolong=keep` trains on" in capsys.readouterr().out
    assert len(told(folder, "open")) == 1


def test_training_an_unfinished_run_again_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, {"attempt": 0, "rank": 0, "step": 13, "do": "exit", "code": 78})
    assert main(["train", "demo.yaml"]) == 78
    assert main(["train", "demo.yaml"]) == 0
    assert "run demo continues; its newest checkpoint is of step 10 of 20" in capsys.readouterr().out
    assert [s["step"] for s in told(folder, "start")] == [0, 10]


def test_the_resolved_file_in_the_run_directory_is_the_same_run(folder: Path) -> None:
    plan(folder, {"attempt": 0, "rank": 0, "step": 13, "do": "exit", "code": 78})
    assert main(["train", "demo.yaml"]) == 78
    assert main(["train", "runs/demo/run.yaml"]) == 0


def test_another_spec_under_the_same_name_is_refused_with_what_differs_and_the_ways_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "demo.yaml"]) == 0
    assert main(["train", "demo.yaml", "train.batch=8", "--seed", "7"]) == 2
    err = capsys.readouterr().err
    assert "seed was 0, now 7" in err
    assert "train.batch was 4, now 8" in err
    assert "--name OTHER" in err
    assert "--fresh" in err
    assert "shoal resume" not in err  # that way is closed for a batch
    assert main(["train", "demo.yaml", "train.steps=40"]) == 2
    assert "`shoal resume demo train.steps=40` to change it on purpose" in capsys.readouterr().err
    assert len(told(folder, "open")) == 1


def test_fresh_sets_the_old_run_aside_and_never_deletes_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert main(["train", "demo.yaml", "--fresh", "seed=3"]) == 0
    kept = sorted(p.name for p in (folder / "runs").iterdir())
    assert kept[0] == "demo"
    assert len(kept) == 3
    assert all(re.fullmatch(r"demo\.old-\d{8}-\d{6}(-\d+)?", name) for name in kept[1:])
    assert all((folder / "runs" / name / "journal.jsonl").exists() for name in kept)
    assert "the old run is now" in capsys.readouterr().out


def test_name_and_processes_are_short_for_overrides(folder: Path) -> None:
    plan(folder, name="other")
    assert main(["train", "demo.yaml", "--name", "other", "--processes", "1"]) == 0
    assert [a["world"] for a in told(folder, "attempt", "other")] == [1]


def test_workspace_puts_the_run_elsewhere(folder: Path) -> None:
    (folder / "there").mkdir()
    plan(folder / "there")
    assert main(["train", "demo.yaml", "--workspace", "there"]) == 0
    assert RunDir.of("demo", folder / "there").exists()
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", "none.yaml"], 2, "none.yaml"),
        (["train", "demo.yaml", "data.train=nowhere"], 78, "which does not exist; run `shoal data prepare"),
        (["train", "demo.yaml", "train.stops=3"], 2, "train.steps"),
        (["train", "demo.yaml", "--processes", "3"], 2, "train.batch 4 cannot be split over 3 processes"),
        (["train", "demo.yaml", "--processes", "x"], 2, "invalid int value"),
        (["resume", "demo"], 2, "there is no run 'demo'"),
        (["stop", "demo"], 2, "there is no run 'demo'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("shoal: ")
    assert says in err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("verb", [["train", "demo.yaml"], ["train", "demo.yaml", "--fresh"]])
def test_a_run_directory_that_cannot_be_made_is_one_sentence_and_78(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    (folder / "runs").write_text("a file where a folder should be")
    assert main(verb) == 78
    err = capsys.readouterr().err
    assert "cannot write the run directory" in err
    assert "--workspace" in err
    assert err.count("\n") == 1


def test_resume_changes_what_is_safe_and_records_it(folder: Path) -> None:
    assert main(["train", "demo.yaml"]) == 0
    plan(folder, steps=30)
    longer = ["train.steps=30", "train.schedule.prolong=keep"]
    assert main(["resume", "demo", *longer, "--train.optimizer.lr", "1e-5", "guard.restarts=1"]) == 0
    run = load(RunDir.of("demo", folder).spec_file).run
    assert (run.train.steps, run.train.optimizer.lr, run.guard.restarts) == (30, 1e-5, 1)
    asked = {d["key"]: (d["value"], d["why"]) for d in told(folder, "decision") if d.get("asked")}
    assert asked["train.steps"] == (30, "asked for on resume; it was 20")
    assert set(asked) == {"train.steps", "train.schedule.prolong", "train.optimizer.lr", "guard.restarts"}
    assert [s["step"] for s in told(folder, "start")] == [0, 20]
    assert told(folder, "step")[-1]["step"] == 30


def test_resume_asks_how_the_rate_goes_on_and_show_says_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo.yaml"]) == 0
    capsys.readouterr()
    spec_file = RunDir.of("demo", folder).spec_file
    before = spec_file.read_text()
    for verb in (["resume", "demo"], ["show", "demo"]):
        assert main([*verb, "train.steps=30"]) == 2
        err = capsys.readouterr().err
        assert "the learning rate at step 20 would jump from 3e-05 to " in err
        assert "train.schedule.prolong=keep (stays at 3e-05)" in err
        assert err.count("\n") == 1
    assert spec_file.read_text() == before
    fall = ["train.schedule.prolong=decay", "train.schedule.min_ratio=0"]
    goes = "rate from step 21: 3e-05, which it had, falling to 0 at step 30"
    assert main(["show", "demo", "train.steps=30", *fall]) == 0
    assert goes in capsys.readouterr().out
    assert spec_file.read_text() == before
    plan(folder, steps=30)
    assert main(["resume", "demo", "train.steps=30", *fall]) == 0
    assert goes in capsys.readouterr().out
    schedule = load(spec_file).run.train.schedule
    assert [(p.until, p.steps, p.then) for p in schedule.past] == [(20, 20, "decay")]
    assert schedule.prolong is None  # the next time it is asked for again
    assert main(["resume", "demo", "train.steps=40"]) == 2
    by_file = ["train", "demo.yaml", "train.steps=30", "train.schedule.min_ratio=0"]
    assert main(by_file) == 0  # the same run
    assert "is finished: 30 steps" in capsys.readouterr().out


def test_resume_on_another_number_of_processes_decides_the_layout_anew(folder: Path) -> None:
    plan(folder, {"attempt": 0, "rank": 0, "step": 13, "do": "exit", "code": 78})
    assert main(["train", "demo.yaml", "mesh.dp_shard=1"]) == 78
    assert load(RunDir.of("demo", folder).spec_file).run.mesh.dp_replicate == 2
    assert main(["resume", "demo", "resources.processes=1"]) == 0
    run = load(RunDir.of("demo", folder).spec_file).run
    assert (run.resources.processes, run.mesh.dp_replicate, run.mesh.dp_shard) == (1, 1, 1)
    assert [a["world"] for a in told(folder, "attempt")] == [2, 1]


@pytest.mark.parametrize(
    "override", ["seed=1", "data.seq_len=8", "model.dim=64", "train.batch=8", "train.optimizer.name=muon"]
)
def test_resume_refuses_what_would_break_the_history(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    assert main(["train", "demo.yaml"]) == 0
    before = RunDir.of("demo", folder).spec_file.read_text()
    assert main(["resume", "demo", override]) == 2
    err = capsys.readouterr().err
    assert f"{override.split('=')[0]} was " in err
    assert "would break the history of run 'demo'" in err
    assert RunDir.of("demo", folder).spec_file.read_text() == before
    assert len(told(folder, "open")) == 1


def test_resume_refuses_fewer_steps_than_are_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo.yaml"]) == 0
    assert main(["resume", "demo", "train.steps=5"]) == 2
    assert "less than the 20 steps that are done" in capsys.readouterr().err


@pytest.fixture
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`shoal train` in a process of its own, with fake workers, somewhere in its steps."""
    plan(folder, steps=100_000)
    code = (
        "import sys; from shoal.guard import supervise as s; "
        f"s.worker_command = lambda run_dir: [sys.executable, {str(FAKE)!r}, str(run_dir.path)]; "
        "from shoal.cli.main import main; sys.exit(main(['train', 'demo.yaml', 'train.steps=100000']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: told(folder, "step"))
    yield process
    process.kill()
    process.wait()


def test_stop_waits_until_the_run_has_saved(
    folder: Path, running: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "demo"]) == 0
    assert running.wait(limit(10)) == 143
    step = told(folder, "step")[-1]["step"]
    assert f"run demo: stopped at step {step} (told to stop (SIGTERM); saved at step {step})" in capsys.readouterr().out
    assert main(["stop", "demo"]) == 0
    assert "run demo is not running: stopped at step" in capsys.readouterr().out


def test_a_running_run_is_neither_started_resumed_nor_set_aside_again(
    folder: Path, running: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (
        ["train", "demo.yaml", "train.steps=100000"],
        ["train", "demo.yaml", "train.steps=100000", "--fresh"],
        ["resume", "demo"],
    ):
        assert main(verb) == 2
        assert f"run 'demo' is already running as pid {running.pid}" in capsys.readouterr().err
    assert main(["stop", "demo", "--now"]) == 0
    assert running.wait(limit(10)) == 143
    assert len(told(folder, "open")) == 1


def test_stop_says_when_the_run_is_still_stopping(
    folder: Path, running: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    pids = told(folder, "attempt")[-1]["pids"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert main(["stop", "demo", "--timeout", "0.5"]) == 75
    assert "is still at it after 0.5 s; wait, or `shoal stop demo --now`" in capsys.readouterr().err
    assert main(["stop", "demo", "--now", "--timeout", "5"]) == 0
    assert running.wait(limit(10)) == 143
    assert not any(map(alive, pids))


def test_stop_of_a_run_whose_supervisor_died_says_so(
    folder: Path, running: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    running.kill()
    running.wait()
    assert main(["stop", "demo"]) == 0
    assert "its supervisor died at step" in capsys.readouterr().out


def test_epochs_become_steps_of_which_the_journal_says_why_and_a_longer_run_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "demo.yaml").read_text()
    schedule = "schedule: {warmup_steps: 50%}"
    (folder / "demo.yaml").write_text(text.replace("steps: 20, batch: 4", f"epochs: 2, batch: 4, {schedule}"))
    plan(folder, steps=6)
    assert main(["train", "demo.yaml"]) == 0
    assert "run demo done at step 6 of 6" in capsys.readouterr().out
    decided = {d["key"]: (d["value"], d["why"]) for d in told(folder, "decision")}
    assert decided["train.steps"] == (6, "2 x 12 windows in steps of 4")
    assert decided["train.schedule.warmup_steps"] == (3, "50% of 6 steps")
    assert main(["train", "demo.yaml"]) == 0  # the same run, though its own file says steps
    assert main(["train", "demo.yaml", "train.tokens=500"]) == 2
    assert "train.steps was 6, now 8" in capsys.readouterr().err
    plan(folder, steps=9)
    assert main(["resume", "demo", "train.epochs=3", "train.schedule.prolong=keep"]) == 0
    resolved = load(RunDir.of("demo", folder).spec_file).run.train
    assert (resolved.steps, resolved.epochs, resolved.schedule.warmup_steps) == (9, None, 3)  # as it was warmed up
    assert main(["resume", "demo", "train.epochs=2"]) == 2
    assert "train.steps=6 is less than the 9 steps that are done" in capsys.readouterr().err


def test_what_cannot_be_counted_here_is_said_with_what_can(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = ["data.train=gone", "model.vocab_size=512"]
    assert main(["plan", "demo.yaml", "train.epochs=2", *gone]) == 78
    err = capsys.readouterr().err
    assert "train.epochs 2: how many steps that are is known once data.train can be read here" in err
    assert "train.steps or train.tokens need no data" in err
    assert main(["plan", "demo.yaml", "train.tokens=1B", "--on", "h100", "--json", *gone]) == 0
