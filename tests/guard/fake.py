"""A run directory with a plan for fake workers, and ways to supervise it here or in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.guard.supervisor import fake_command
from tests.patience import until as until

from shoal.guard.supervise import supervise
from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.spec.run import Run

SUPERVISOR = Path(__file__).with_name("supervisor.py")


class FakeRun:
    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._started: list[subprocess.Popen[str]] = []

    def plan(
        self, *faults: dict[str, Any], steps: int = 20, world: int = 2, guard: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """`guard` is that section of the run file; `more` is for the fake worker."""
        guard = {"backoff_s": 0.01, "grace_s": 10.0, **(guard or {})}
        self.run = Run.model_validate(
            {
                "name": self.run_dir.name,
                "data": {"train": "data"},
                "train": {"steps": steps},
                "guard": guard,
                "track": more.pop("track", {"mlflow": False}),
            }
        )
        self.world = world
        told = {"steps": steps, "step_s": 0.005, "save_every": 5, "faults": faults, "world": world, **more}
        self.run_dir.path.mkdir(parents=True, exist_ok=True)
        (self.run_dir.path / "script.json").write_text(json.dumps({**told, "run": self.run.model_dump(mode="json")}))

    def supervise(self, **more: Any) -> int:
        return supervise(self.run_dir, self.run, self.world, command=fake_command(self.run_dir.path), **more)

    def start(self, **more: Any) -> subprocess.Popen[str]:
        """The supervisor in a process of its own; `more` goes to `supervise`."""
        process = subprocess.Popen(
            [sys.executable, str(SUPERVISOR), str(self.run_dir.path), json.dumps(more)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def records(self, kind: str) -> list[Record]:
        return [r for r in records(self.run_dir.journal_file) if r["kind"] == kind] if self.run_dir.exists() else []

    def pids(self) -> list[int]:
        """A worker's first step may be told before the attempt is."""
        until(lambda: self.records("attempt"))
        return list(self.records("attempt")[-1]["pids"])

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # a zombie is gone in every way that matters


KILL = int(signal.SIGKILL)
