"""Agents of a job as processes of this machine, each taken for a node."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.patience import Stopwatch, limit

from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.spec import dump
from shoal.spec.run import Run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Cluster:
    run: Run
    workspace: Path
    nodes: int
    least: int | None = None
    job: str = "job-1"
    env: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"  # by which the others look for node 0
    before: dict[int, list[str]] = field(default_factory=dict)  # what a node's command is put behind
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def run_dir(self) -> RunDir:
        return RunDir.of(self.run.name, self.workspace)

    def start(self, node: int, workspace: Path | None = None, token: str | None = None) -> subprocess.Popen[bytes]:
        file = self.workspace / "asked.yaml"
        if not file.exists():
            file.write_text(dump(self.run))
        env = os.environ | {
            "SHOAL_NODE": str(node),
            "SHOAL_NODES": str(self.nodes),
            "SHOAL_HEAD": f"{self.host}:{self.port}",
            "SHOAL_TOKEN": token or self.token,
            "SHOAL_JOB": self.job,
            "SHOAL_NODES_HERE": str(self.nodes),
            **self.env,
        }
        command = [
            *self.before.get(node, []), sys.executable, "-m", "shoal.launch.agent", str(file),
            "--workspace", str(workspace or self.workspace), "--processes", "1",
            "--min-nodes", str(self.least or self.nodes),
        ]  # fmt: skip
        with open(self.log(node), "ab") as out:
            self.agents[node] = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        return self.agents[node]

    def start_all(self) -> None:
        for node in range(self.nodes):
            self.start(node)

    def log(self, node: int) -> Path:
        return self.workspace / f"agent-{node}.log"

    def codes(self, timeout_s: float = 120.0) -> dict[int, int]:
        """How all of them left."""
        return {n: agent.wait(limit(timeout_s)) for n, agent in self.agents.items()}

    def records(self, kind: str) -> list[Record]:
        file = self.run_dir.journal_file
        return [r for r in records(file) if r["kind"] == kind] if file.exists() else []

    def wait_for(self, kind: str, timeout_s: float = 90.0, since: float = 0.0, **having: object) -> Record:
        watch = Stopwatch()
        while watch.quiet_s() < timeout_s:
            for record in self.records(kind):
                if record["t"] >= since and all(record.get(name) == value for name, value in having.items()):
                    return record
            if (head := self.agents.get(0)) and head.poll() is not None and not having.get("_after_end"):
                break
            time.sleep(0.05)
        raise AssertionError(f"no record {kind} {having}; node 0 said: {self.log(0).read_text()[-2000:]}")

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
