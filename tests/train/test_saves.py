"""The real `shoal train`, with its saves in the background: killed, told to stop, replaced.

`tests/checkpoint/test_saver.py` claims the same, and more, of a trainer that starts in a tenth of the time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from shoal import checkpoint
from shoal.checkpoint import Name
from shoal.errors import TOLD_TO_STOP, WRONG_ENVIRONMENT
from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from tests.guard.fake import alive, until
from tests.patience import Stopwatch, limit
from tests.train.tiny import make_data
from tests.warm import Executed

RUN = """
name: tiny
model: {dim: 32, layers: 2, heads: 4}
data: {train: data, seq_len: 32}
train: {steps: 1000000, batch: 4}
checkpoint: {every: 20, memory: off}
resources: {processes: PROCESSES, threads: 1, device: cpu}
track: {mlflow: false}
guard: {backoff_s: 0.1, grace_s: 30}
"""
SLOW = "written:sleep=2"  # a disk that takes its time, as often as there are tokens
START_S = 240.0  # of torch, on a machine that may be busy
pytestmark = pytest.mark.usefixtures("warm_starts")


@dataclass
class Real:
    """A run in a workspace of its own, and what is started of it."""

    workspace: Path

    def __post_init__(self) -> None:
        self.run_dir = RunDir.of("tiny", self.workspace)
        self.tokens = self.workspace / "tokens"
        self.tokens.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"SHOAL_FAULT": SLOW, "SHOAL_FAULT_TOKENS": str(self.tokens), **environment}
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.workspace,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def told(self, kind: str) -> list[Record]:
        path = self.run_dir.journal_file
        return [r for r in records(path) if r["kind"] == kind] if path.exists() else []

    def step(self) -> int:
        steps = self.told("step")
        return int(steps[-1]["step"]) if steps else 0

    def saved(self) -> int:
        return max((r["step"] for r in self.told("checkpoint")), default=-1)

    def newest(self) -> Name:
        found = checkpoint.newest(self.run_dir.checkpoints, verify=True)
        assert found is not None
        return found.name

    def wait_for_a_save_in_flight(self, ranks: int) -> int:
        """The disk becomes slow; returns the step that all ranks have handed over, and training is beyond it."""
        for rank in range(ranks):
            (self.tokens / f"{time.monotonic()}-{rank}").touch()
        until(lambda: not [t for t in self.tokens.iterdir() if t.suffix != ".used"], within_s=60)
        saving = next(name for p in self.run_dir.checkpoints.glob(".tmp-*") if (name := Name.of(p.name[5:])))
        until(lambda: self.step() > saving.step + 2, within_s=60)
        return saving.step

    def persisters(self) -> list[int]:
        return [
            process.pid
            for process in psutil.process_iter(["cmdline", "environ"])
            if "shoal.checkpoint.persister" in (process.info["cmdline"] or [])
            and (process.info["environ"] or {}).get("SHOAL_FAULT_TOKENS") == str(self.tokens)
        ]

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        until(lambda: not self.persisters(), within_s=30)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Real]:
    make_data(tmp_path / "data")
    run = Real(tmp_path)
    yield run
    run.end()


def write_run(real: Real, processes: int) -> None:
    (real.workspace / "tiny.yaml").write_text(RUN.replace("PROCESSES", str(processes)))


@pytest.mark.slow  # test_saver.py has it without a model
@pytest.mark.timeout(900)
def test_a_save_outlives_its_worker_and_a_stop_waits_for_one_in_flight(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", Executed)  # as a person starts it
    write_run(real, processes=2)
    supervisor = real.start("shoal", "train", "tiny.yaml")
    until(lambda: real.saved() > 0, within_s=START_S)

    in_flight = real.wait_for_a_save_in_flight(ranks=2)
    assert real.saved() < in_flight
    for pid in real.told("attempt")[-1]["pids"]:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(real.told("start")) == 2, within_s=START_S)
    assert real.told("start")[-1]["step"] == in_flight, "nobody told the trainer that it was saved"

    until(lambda: real.saved() > in_flight, within_s=START_S)
    in_flight = real.wait_for_a_save_in_flight(ranks=2)
    watch = Stopwatch()
    supervisor.send_signal(signal.SIGUSR2)
    assert supervisor.wait(limit(60)) == TOLD_TO_STOP
    assert watch.quiet_s() < 30
    assert [r["step"] for r in real.told("checkpoint")][-2:] == [in_flight, real.step()]
    assert real.newest().step == real.step()
    (closed,) = real.told("close")
    assert closed["reason"] == f"told to stop (SIGUSR2); saved at step {real.step()}"
    assert not real.persisters()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_worker_that_is_told_to_stop_by_somebody_else_saves_and_the_run_ends_with_143(
    real: Real, number: int
) -> None:
    write_run(real, processes=1)
    supervisor = real.start("shoal", "train", "tiny.yaml")
    until(lambda: real.saved() > 0, within_s=START_S)
    real.wait_for_a_save_in_flight(ranks=1)
    (pid,) = real.told("attempt")[-1]["pids"]
    os.kill(pid, number)
    assert supervisor.wait(limit(60)) == TOLD_TO_STOP
    assert real.newest().step == real.step() == real.saved()
    assert not alive(pid)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_that_was_replaced_ends_with_78_and_nothing_of_it_is_used(real: Real) -> None:
    """Two nodes that both believe to be the run: one was stopped for a while."""
    write_run(real, processes=1)
    first = real.start("shoal", "train", "tiny.yaml")
    until(lambda: real.saved() > 0, within_s=START_S)
    first.send_signal(signal.SIGTERM)
    assert first.wait(limit(60)) == TOLD_TO_STOP

    worker = ("shoal.train", "--worker", str(real.run_dir.path))
    zombie = real.start(*worker)
    until(lambda: len(real.told("start")) == 2, within_s=START_S)
    saved = real.saved()
    until(lambda: real.saved() > saved, within_s=60)
    zombie.send_signal(signal.SIGSTOP)
    until(lambda: not list(real.run_dir.checkpoints.glob(".tmp-*")))
    went_on_from = real.newest()

    other = real.start(*worker)
    until(lambda: real.newest().term > went_on_from.term, within_s=START_S)
    zombie.send_signal(signal.SIGCONT)
    assert zombie.wait(limit(60)) == WRONG_ENVIRONMENT
    other.send_signal(signal.SIGTERM)
    assert other.wait(limit(60)) == TOLD_TO_STOP
    assert real.told("start")[-1]["step"] == went_on_from.step
    assert real.newest().term == went_on_from.term + 1
