"""The mirror as a process: follows a run, ends with it, and a tracker that is away is said once and kept for later."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.track import mirror as mirror_module
from shoal.track.events import Reader
from shoal.track.mirror import Mirror, Watch
from shoal.track.pump import Pump
from tests.journal.journals import Story, change_spec, crash_and_finish, make_run
from tests.patience import Stopwatch, limit
from tests.track.servers import answering, closed_port, silent


def warnings(run_dir: RunDir) -> list[str]:
    return [r["text"] for r in records(run_dir.journal_file) if r["kind"] == "warning"]


def start_mirror(run_dir: RunDir, grace_s: float = 15.0) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "shoal.track.mirror",
        str(run_dir.path),
        "--until-closed",
        "--grace-s",
        str(grace_s),
    ]
    return subprocess.Popen(command)


def scalars(run_dir: RunDir, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir.path / "tensorboard"))
    found.Reload()
    return [(s.step, s.value) for s in found.Scalars(tag)]


def wandb_history(file: Path) -> Iterator[dict[str, float]]:
    """The rows of an offline W&B file: LevelDB's log format, 32 KiB blocks of records that may be cut in pieces."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece = data[at + 7 : at + 7 + length]
        at += 7 + length
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(whole)
            if record.WhichOneof("record_type") == "history":
                yield {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}


def test_it_follows_a_run_to_tensorboard_and_wandb_and_ends_with_it(tmp_path: Path) -> None:
    story = make_run(tmp_path, mlflow=False, tensorboard=True, wandb="offline").open().start().steps(30)
    process = start_mirror(story.run_dir)
    cursor = story.run_dir.track / "tensorboard.json"
    watch = Stopwatch()
    while not cursor.exists() and watch.quiet_s() < 60:
        time.sleep(0.05)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    story.steps(50).failure().start(at_step=20).steps(60).eval().close()
    assert process.wait(limit(60)) == 0
    assert [step for step, _ in scalars(story.run_dir, "train/loss")] == list(range(1, 61))
    assert scalars(story.run_dir, "run/attempt")[-1] == (20, 1.0)
    (file,) = (story.run_dir.track / "wandb").glob("offline-run-*/*.wandb")
    rows = list(wandb_history(file))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 61))
    first = next(r for r in story.records if r["kind"] == "step")
    assert next(row for row in rows if "loss" in row)["_timestamp"] == pytest.approx(first["t"], abs=1e-3)
    assert warnings(story.run_dir) == []


def test_a_refused_connection_is_said_once_and_holds_back_no_other_tracker(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct-horse")
    story = make_run(workspace, mlflow=address, tensorboard=True).open().start().steps(30)
    process = start_mirror(story.run_dir, grace_s=limit(2.0))
    watch = Stopwatch()
    while not warnings(story.run_dir) and watch.quiet_s() < 60:
        time.sleep(0.1)
    story.steps(60).close()
    watch = Stopwatch()
    assert process.wait(limit(60)) == 75
    assert watch.quiet_s() < mirror_module.GRACE_S - 3  # after the 2 s it was given, with room to end
    (said,) = warnings(story.run_dir)
    assert "connection refused" in said
    assert "shoal track sync demo" in said
    assert f"MLflow at {address}" in said
    written = [f for f in story.run_dir.path.rglob("*") if f.suffix in (".jsonl", ".log", ".json")]
    assert [f.name for f in written if "correct-horse" in f.read_text()] == []
    assert len(scalars(story.run_dir, "train/loss")) == 60

    # The rest is uploaded later, once the address is right.
    change_spec(story.run_dir, track={"mlflow": True})
    assert all(pump.complete for pump in Mirror(story.run_dir, until_closed=False).sync())


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"oops", "HTTP 500"),
        (401, b"who are you", "HTTP 401 (not logged in)"),
        (200, b"<html>a captive portal</html>", ""),
        (200, b"{}", ""),
    ],
)
def test_a_server_that_answers_wrongly_is_said_once_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, why: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with answering(status, body) as (address, seen):
        story = crash_and_finish(make_run(tmp_path, mlflow=address))
        (pump,) = Mirror(story.run_dir, until_closed=False).sync()
    assert seen
    assert not pump.complete
    assert pump.failing
    assert why in pump.failing
    (said,) = warnings(story.run_dir)
    assert pump.failing in said
    assert pump.behind_bytes >= sum(1 for _ in story.records)


def test_a_server_that_never_answers_is_left_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with silent() as address:
        story = crash_and_finish(make_run(tmp_path, mlflow=address))
        watch = Stopwatch()
        (pump,) = Mirror(story.run_dir, until_closed=False).sync()
    assert pump.failing == "no answer in time"
    assert watch.quiet_s() < 20


def test_a_missing_package_is_one_warning_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # what Python does where it is not installed
    story = crash_and_finish(make_run(tmp_path, tensorboard=True))
    mirror = Mirror(story.run_dir, until_closed=True)
    assert mirror.follow(grace_s=20) is False
    mlflow, tensorboard = mirror.pumps
    assert (mlflow.complete, tensorboard.complete) == (False, True)
    (said,) = warnings(story.run_dir)
    assert "pip install mlflow`" in said


def test_a_run_file_that_cannot_be_read_is_one_warning(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(3).close()
    story.run_dir.spec_file.write_text("name: demo\nsteps: nonsense\n")
    assert mirror_module.main([str(story.run_dir.path)]) == 2
    (said,) = warnings(story.run_dir)
    assert said.startswith("nothing is uploaded to the trackers: ")


def test_two_mirrors_of_one_run_do_not_upload_at_the_same_time(tmp_path: Path) -> None:
    story = make_run(tmp_path, mlflow=False, tensorboard=True).open().start().steps(10)
    process = start_mirror(story.run_dir)
    watch = Stopwatch()
    while not (story.run_dir.track / "tensorboard.json").exists() and watch.quiet_s() < 60:
        time.sleep(0.05)
    (pump,) = Mirror(story.run_dir, until_closed=False).sync()
    assert not pump.complete
    assert "another process" in pump.failing
    story.close()
    assert process.wait(limit(60)) == 0


def test_that_the_process_of_a_run_has_left_is_nothing_to_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = make_run(tmp_path, mlflow=False, tensorboard=True).open().start().steps(3).close()
    (pump,) = Mirror(story.run_dir, until_closed=False).sync()
    assert pump.complete
    story.write("exit", session=0)
    monkeypatch.setattr(Pump, "_keep_trying", lambda self: pytest.fail("it has connected"))
    (pump,) = Mirror(story.run_dir, until_closed=False).sync()
    assert pump.complete


def test_a_session_without_a_supervisor_or_a_close_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = make_run(tmp_path).open().start().steps(10)
    watch = Watch(story.run_dir)
    assert watch.ended() is None
    story.run_dir.pid_file.touch()
    assert watch.ended() is None, "a moment of silence is no death"
    monkeypatch.setattr(mirror_module, "QUIET_S", 0.05)
    time.sleep(0.1)
    assert watch.ended() == "dead"
    story.close()
    assert watch.ended() == "closed"


def test_a_dead_run_does_not_stay_running_in_the_tracker(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    story = make_run(workspace).open().start().steps(10)
    story.run_dir.pid_file.touch()
    monkeypatch.setattr(mirror_module, "QUIET_S", 0.05)
    assert Mirror(story.run_dir, until_closed=True).follow(grace_s=30)
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    known = json.loads((story.run_dir.track / "mlflow.json").read_text())
    assert client.get_run(known["remote"]["run_id"]).info.status == "KILLED"


def test_reading_goes_on_where_it_stopped_and_still_knows_redone_steps(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(20)
    reader = Reader(story.run_dir.journal_file)
    reader.skip_to(story.run_dir.journal_file.stat().st_size)
    assert reader.batch(1000) == []
    story.failure().start(at_step=10).steps(25).close()
    events = reader.batch(1000)
    assert [e.step for e in events if e.kind == "metrics" and e.again] == list(range(11, 21))
    assert [e.step for e in events if e.kind == "metrics" and not e.again] == list(range(21, 26))
    assert events[-1].offset == story.run_dir.journal_file.stat().st_size


def test_a_batch_is_bounded_however_far_behind_the_mirror_is(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(500)
    reader = Reader(story.run_dir.journal_file)
    sizes = []
    while events := reader.batch(900):
        sizes.append(sum(len(e.values) for e in events))
    assert max(sizes) < 1000
    assert sum(sizes) == 500 * 5 + 1


def test_a_journal_written_while_it_is_mirrored_is_uploaded_whole(tmp_path: Path) -> None:
    """Lines arrive in pieces: half a line is not read, and is read once it is whole."""
    story = make_run(tmp_path)
    story.open().start()
    path = story.run_dir.journal_file
    reader = Reader(path)
    assert [e.kind for e in reader.batch(10)] == ["open", "start"]
    line = json.dumps({"v": 1, "kind": "close", "t": 1.0, "status": "done"}) + "\n"
    with open(path, "a") as f:
        f.write(line[:20])
        f.flush()
        assert reader.batch(10) == []
        f.write(line[20:])
    assert [e.kind for e in reader.batch(10)] == ["close"]


def test_the_story_is_the_contract(tmp_path: Path) -> None:
    """The generator writes what `Journal` would: the same keys, readable by the same reader."""
    story: Story = crash_and_finish(make_run(tmp_path))
    assert records(story.run_dir.journal_file) == story.records
