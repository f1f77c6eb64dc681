"""A real Ray cluster on this machine: a head without cores for work, and raylets that are taken for machines.

Every `ray start --block` is tied to the test process, and its daemons to it: nothing outlives a test that dies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import Stopwatch, limit
from tests.require import unavailable
from tests.services import free_ports

READY_S = 240.0  # 10 s on an idle machine
STORE_BYTES = 80_000_000  # the least that Ray takes is 75 MB
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # On a machine with other work the start of a process takes its time.
    "RAY_raylet_start_wait_time_s": "90",
    "RAY_worker_register_timeout_seconds": "200",
    "RAY_enable_worker_prestart": "0",
    # A machine that is gone is noticed in seconds (nobody answers at all); one that is slow has a minute.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "12000",
    "RAY_memory_monitor_refresh_ms": "0",  # others' memory is no reason to kill what is tested
}


class RayCluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._gcs, dashboard, client = free_ports(3)
        self.address = f"http://127.0.0.1:{dashboard}"
        self.bootstrap = f"127.0.0.1:{self._gcs}"
        self._mark = f"SHOAL_TEST_RAY={folder}"
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._start(
            "head", "--head", f"--port={self._gcs}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1",
            f"--temp-dir={folder}", "--num-cpus=0", "--no-monitor", f"--ray-client-server-port={client}",
        )  # fmt: skip
        self._await(0)

    def add(self, *names: str) -> None:
        """Machines of one core each; ready when this returns. One after another, and one that Ray could not register
        once more: on a host that has others' work too it chooses a port that is taken by then, or gives up early."""
        for name in names:
            before = len(self.machines())
            for tries in range(2):
                self._start(name, f"--address={self.bootstrap}", "--num-cpus=1")
                try:
                    self._await(before + 1)
                    break
                except RuntimeError:
                    if tries:
                        raise
                    self.kill(name)

    def kill(self, name: str) -> None:
        """The machine and all that runs on it, at once."""
        process = self._nodes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(limit(30))
        _end([pid for pid in _all_pids() if _session(pid) == process.pid])

    def close(self) -> None:
        for name in reversed(list(self._nodes)):
            self.kill(name)
        watch = Stopwatch()
        while left := [pid for pid in _all_pids() if self._mark in _environment(pid)]:  # drivers, actors, agents
            assert watch.quiet_s() < 30, f"processes {left} of Ray do not end"
            _end(left)
            time.sleep(0.2)

    def machines(self) -> list[dict[str, Any]]:
        """Those that are alive and can work."""
        listed = self.ask("/api/v0/nodes?detail=1&limit=1000")["data"]["result"]["result"]
        return [n for n in listed if n["state"] == "ALIVE" and n["resources_total"].get("CPU", 0) > 0]

    def machine_with(self, *variables: str) -> str:
        """The one on which a process with that environment runs."""
        names = {process.pid: name for name, process in self._nodes.items()}
        pid = self.parent_of(*variables)
        while pid not in names:
            pid = _parent(pid)
        return names[pid]

    def parent_of(self, *variables: str) -> int:
        """Of the eldest process with that environment."""
        having = [pid for pid in _all_pids() if set(variables) <= set(_environment(pid))]
        return next(parent for pid in having if (parent := _parent(pid)) not in having)

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=limit(30)) as answer:
            return json.load(answer)

    def _start(self, name: str, *options: str) -> None:
        command = [
            sys.executable, "-m", "shoal.guard.tied", str(os.getpid()), sys.executable, "-m", "ray.scripts.scripts",
            "start", "--block", "--disable-usage-stats", "--include-log-monitor=false", "--num-gpus=0",
            "--node-ip-address=127.0.0.1", f"--object-store-memory={STORE_BYTES}", "--dashboard-agent-listen-port=0",
            "--min-worker-port=0", "--max-worker-port=0", *options,
        ]  # fmt: skip
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | ENVIRONMENT
        env |= dict([self._mark.split("=", 1)])
        with open(self.folder / f"{name}.log", "ab") as log:
            self._nodes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def _await(self, machines: int) -> None:
        watch = Stopwatch()
        while watch.quiet_s() < READY_S:
            with suppress(OSError, ValueError, KeyError, TypeError):  # not yet
                if len(self.machines()) >= machines:
                    return
            for name, process in self._nodes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} of Ray ended:\n{self._said(name)}")
            time.sleep(0.3)
        raise RuntimeError(f"Ray was not ready after {READY_S:g} s:\n{self._said('head')}")

    def _said(self, name: str) -> str:
        """The last words of that one and of whatever else ended badly; the folder will be gone."""
        logs = [self.folder / f"{name}.log", *sorted((self.folder / "session_latest" / "logs").glob("raylet*"))]
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-3000:]}" for path in logs)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def ray_cluster(*machines: str) -> Iterator[RayCluster]:
    try:
        import ray  # noqa: F401
    except ImportError:
        unavailable("ray", "Ray is not installed: pip install 'ray[default]'")
    folder = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp"))  # a socket's path must be short
    cluster = None
    try:
        cluster = RayCluster(folder)
        cluster.add(*machines)
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
