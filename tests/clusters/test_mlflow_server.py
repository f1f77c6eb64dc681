"""A real MLflow server that dies, comes back, or was never a server: the run is whole over there in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.journal.journals import loss_at, make_run
from tests.patience import Stopwatch, limit
from tests.track.servers import answering, closed_port, silent

from shoal.cli.main import main
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


class Server:
    """`mlflow server` on a port of its own, in a process group of its own: it has workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, closed_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--default-artifact-root", str(self.folder / "artifacts")]
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self.folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        watch = Stopwatch()  # 8 s on an idle machine
        while watch.quiet_s() < 240:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=limit(5)):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        pytest.fail(f"mlflow server did not start: {(self.folder / 'server.log').read_text()[-2000:]}")

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests, since it takes long to start; each test leaves it running and has an experiment of its own."""
    found = Server(tmp_path_factory.mktemp("server"))
    found.start()
    yield found
    found.kill()


def uploaded(server: Server, experiment_name: str) -> tuple[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(server.address)
    experiment = client.get_experiment_by_name(experiment_name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run.info.status, [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]


def warnings(run_dir: RunDir) -> list[str]:
    return [r["text"] for r in records(run_dir.journal_file) if r["kind"] == "warning"]


def wait_for(what: str, run_dir: RunDir, timeout_s: float = 120) -> None:
    log = run_dir.track / "mirror.log"
    watch = Stopwatch()
    while not (log.exists() and what in log.read_text()):
        assert watch.quiet_s() < timeout_s, f"'{what}' never came: {log.read_text() if log.exists() else 'no log'}"
        time.sleep(0.1)


def start_mirror(run_dir: RunDir, grace_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shoal.track.mirror", str(run_dir.path), "--until-closed"]
    return subprocess.Popen([*command, "--grace-s", str(grace_s)])


def test_a_server_killed_and_restarted_misses_nothing_and_is_said_once(server: Server, tmp_path: Path) -> None:
    story = make_run(tmp_path, mlflow=server.address, experiment="killed").open().start().steps(50)
    mirror = start_mirror(story.run_dir, grace_s=60)
    watch = Stopwatch()
    while not (story.run_dir.track / "mlflow.json").exists():
        assert watch.quiet_s() < 120
        time.sleep(0.1)
    server.kill()
    story.steps(120)
    wait_for("connection refused", story.run_dir)
    server.start()
    story.steps(150).failure().start(at_step=100).steps(160)
    wait_for("answers again", story.run_dir)
    story.steps(200).close()
    assert mirror.wait(limit(120)) == 0
    status, losses = uploaded(server, "killed")
    assert status == "FINISHED"
    assert losses == [(step, loss_at(step)) for step in range(1, 201)]
    assert len(warnings(story.run_dir)) == 1


def test_what_a_dead_server_missed_is_uploaded_later(server: Server, tmp_path: Path) -> None:
    story = make_run(tmp_path, mlflow=server.address, experiment="later").open().start().steps(50)
    mirror = start_mirror(story.run_dir, grace_s=3)
    watch = Stopwatch()
    while not (story.run_dir.track / "mlflow.json").exists():
        assert watch.quiet_s() < 120
        time.sleep(0.1)
    server.kill()
    story.steps(200).close()
    watch = Stopwatch()
    assert mirror.wait(limit(60)) == 75
    assert watch.quiet_s() < 10
    assert main(["track", "sync", "demo", "--workspace", str(tmp_path)]) == 75
    server.start()
    assert main(["track", "sync", "--all", "--workspace", str(tmp_path)]) == 0
    assert uploaded(server, "later") == ("FINISHED", [(step, loss_at(step)) for step in range(1, 201)])


def test_servers_that_hang_or_fail_hold_back_neither_the_end_nor_tensorboard(tmp_path: Path) -> None:
    with silent() as hangs, answering(500, b"oops") as (fails, _):
        for name, address in (("hangs", hangs), ("fails", fails)):
            story = make_run(tmp_path, name, mlflow=address, tensorboard=True).open().start().steps(50)
            mirror = start_mirror(story.run_dir, grace_s=2)
            wait_for("MLflow", story.run_dir)
            story.steps(60).close()
            watch = Stopwatch()
            assert mirror.wait(limit(60)) == 75
            assert watch.quiet_s() < 8
            log = (story.run_dir.track / "mirror.log").read_text()
            assert f"TensorBoard files in {story.run_dir.path}/tensorboard: everything is uploaded" in log
            assert len(warnings(story.run_dir)) == 1
