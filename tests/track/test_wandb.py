"""W&B online: a server that dies loses nothing, and a resumed run goes on where the server says it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.journal.journal import records
from shoal.track.about import about
from shoal.track.mirror import Mirror
from tests.journal.journals import make_run
from tests.patience import Stopwatch, limit
from tests.track.fake_wandb import FakeWandb
from tests.track.servers import closed_port


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb(closed_port())
    monkeypatch.setenv("WANDB_BASE_URL", fake.address)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    return fake


def test_a_run_goes_on_where_the_server_says_it_stopped(tmp_path: Path, server: FakeWandb) -> None:
    story = make_run(tmp_path, mlflow=False, wandb="online", group="lr")
    story.open().start().steps(20).close("stopped", 143)
    command = [sys.executable, "-m", "shoal.track.mirror", str(story.run_dir.path)]
    key = about(story.run_dir).key
    with server.up():
        assert subprocess.run(command, timeout=limit(120)).returncode == 0
        assert (server.runs[key]["group"], server.runs[key]["tags"]) == ("lr", ["lr"])
        assert [row["step"] for row in server.history(key) if "loss" in row] == list(range(1, 21))
        assert json.loads(server.runs[key]["summary"])["shoal/status"] == "stopped"

        # The cursor is lost; the server is not asked to take anything twice.
        (story.run_dir.track / "wandb.json").unlink()
        story.wait(60).open(resumed=True).start(at_step=15).steps(30).close()
        assert subprocess.run(command, timeout=limit(120)).returncode == 0
    rows = server.history(key)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 31))
    assert [row["attempt"] for row in rows if "attempt" in row] == [0, 1]
    assert server.runs[key]["exit_code"] == 0


def test_a_dead_server_is_said_once_and_gets_it_all_later(tmp_path: Path, server: FakeWandb) -> None:
    story = make_run(tmp_path, mlflow=False, wandb="online").open().start().steps(20)
    command = [sys.executable, "-m", "shoal.track.mirror", str(story.run_dir.path)]
    mirror = subprocess.Popen([*command, "--until-closed", "--grace-s", "2"])
    watch = Stopwatch()
    while not any(r["kind"] == "warning" for r in records(story.run_dir.journal_file)):
        assert watch.quiet_s() < 120
        time.sleep(0.1)
    story.close()
    watch = Stopwatch()
    assert mirror.wait(limit(60)) == 75
    assert watch.quiet_s() < 8
    warnings = [r["text"] for r in records(story.run_dir.journal_file) if r["kind"] == "warning"]
    assert len(warnings) == 1
    assert f"W&B at {server.address}" in warnings[0]
    with server.up():
        assert subprocess.run(command, timeout=limit(120)).returncode == 0
    assert len([row for row in server.history(about(story.run_dir).key) if "loss" in row]) == 20


@pytest.mark.slow
def test_offline_one_folder_holds_the_whole_run_and_syncs_as_one(tmp_path: Path, server: FakeWandb) -> None:
    story = make_run(tmp_path, mlflow=False, wandb="offline").open().start().steps(20).close("stopped", 143)
    command = [sys.executable, "-m", "shoal.track.mirror", str(story.run_dir.path)]
    assert subprocess.run(command, timeout=limit(120)).returncode == 0
    story.wait(60).open(resumed=True).start(at_step=15).steps(30).close()
    assert subprocess.run(command, timeout=limit(120)).returncode == 0
    assert subprocess.run(command, timeout=limit(120)).returncode == 0  # nothing new: no new folder
    (folder,) = (story.run_dir.track / "wandb").glob("offline-run-*")
    with server.up():
        sync = [sys.executable, "-m", "wandb", "sync", "--yes", str(folder)]
        assert subprocess.run(sync, timeout=limit(120), cwd=tmp_path).returncode == 0
    rows = server.history(about(story.run_dir).key)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 31))


def test_without_a_key_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port()}")
    story = make_run(tmp_path, mlflow=False, wandb="online").open().start().steps(5).close()
    (pump,) = Mirror(story.run_dir, until_closed=False).sync()
    assert pump.failing == "W&B has no API key: run `wandb login` or set WANDB_API_KEY"
