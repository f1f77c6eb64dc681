"""One group of worker processes: start them, see them end, end them. What an end means is decided elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import SetupError
from shoal.guard.pulses import make_folder
from shoal.observe.pulse import FOLDER

TIED = Path(__file__).with_name("tied.py")


@dataclass(frozen=True)
class Death:
    """One worker's end, as the system reported it."""

    rank: int
    pid: int
    exit_code: int | None  # None when a signal ended it
    signal: int | None
    told: bool  # it had been signalled by us, so its end explains nothing
    t: float
    log: Path

    @property
    def by_itself(self) -> bool:
        return not self.told


def log_file(logs: Path, attempt: int, rank: int) -> Path:
    return logs / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"


class Workers:
    """A running group. Each worker leads its own session: Ctrl-C in the terminal does not reach it, and its own
    children can be ended with it."""

    def __init__(self, command: Sequence[str], world: int, attempt: int, logs: Path, threads: int) -> None:
        self.attempt = attempt
        self._scratch = Path(tempfile.mkdtemp(prefix="shoal-rendezvous-"))
        self.pulses = make_folder()  # where they write what they are doing
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        self._told: set[int] = set()
        self._logs = {rank: log_file(logs, attempt, rank) for rank in range(world)}
        try:
            for rank in range(world):
                env = os.environ | worker_env(rank, world, attempt, threads, self._scratch / "store")
                env[FOLDER] = str(self.pulses)
                self._alive[rank] = _start(command, env, self._logs[rank])
        except OSError as e:
            self.close()
            raise SetupError(
                f"cannot start worker {rank} of {world}: {e.strerror} ({e.filename or command[0]})."
            ) from e

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._alive.items()}

    def reap(self) -> list[Death]:
        """The workers that ended since the last call, lowest rank first. Never waits."""
        deaths = []
        for rank, process in list(self._alive.items()):
            code = process.poll()
            if code is None:
                continue
            del self._alive[rank]
            _signal_session(process.pid, signal.SIGKILL)  # what it left behind (data processes, shells)
            exited, signalled = (None, -code) if code < 0 else (code, None)
            told = rank in self._told
            deaths.append(Death(rank, process.pid, exited, signalled, told, time.time(), self._logs[rank]))
        return deaths

    def tell_to_stop(self) -> None:
        """SIGTERM to the workers alone, not to their children: the worker saves and ends those itself."""
        for rank, process in self._alive.items():
            self._told.add(rank)
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for rank, process in self._alive.items():
            self._told.add(rank)
            _signal_session(process.pid, signal.SIGKILL)

    def end(self, grace_s: float, wait: Callable[[float], None]) -> list[Death]:
        """SIGTERM, then SIGKILL after the grace: a worker that waits in a collective hears only the latter."""
        self.tell_to_stop()
        deaths, deadline = self.reap(), time.monotonic() + grace_s
        while self._alive and (left := deadline - time.monotonic()) > 0:
            wait(left)
            deaths += self.reap()
        self.kill()
        while self._alive:
            wait(0.2)
            deaths += self.reap()
        return deaths

    def close(self) -> None:
        """Nothing stays behind, whatever happened to the caller."""
        self.kill()
        for process in self._alive.values():
            process.wait()
        self.reap()
        shutil.rmtree(self._scratch, ignore_errors=True)
        shutil.rmtree(self.pulses, ignore_errors=True)


def worker_env(rank: int, world: int, attempt: int, threads: int, store: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "SHOAL_ATTEMPT": str(attempt),
        # A file of its own for every group: a stale store of a dead group would hand out dead addresses.
        "SHOAL_RENDEZVOUS": f"file://{store}",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # the last words of a killed worker are in its log
        "PYTHONFAULTHANDLER": "1",  # … and the Python stack of one that crashed in native code
    }


def threads_for(asked: int | str, world: int) -> int:
    if isinstance(asked, int):
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // world)


def _start(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    tied = [sys.executable, "-I", "-S", str(TIED), str(os.getpid()), *command]
    with open(log, "ab", buffering=0) as out:
        return subprocess.Popen(
            tied, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def _signal_session(leader_pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader_pid, number)
    except (ProcessLookupError, PermissionError):  # nobody is left in it (macOS says "permission" of zombies)
        return
