"""What stands on each node of a Ray cluster: an actor that keeps one agent of the job.

It travels to the node by value and needs the standard library and Ray alone: Shoal has to be in the Python of the
agents (`launch.python`), which need not be the one that Ray's own processes run in.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

MOST_LINES = 5000  # kept for a driver that is slow to ask; the oldest go first
LAST_WORDS_S = 2.0  # after its end, for what is still in the pipe: a process it left behind may hold that open
LOOK_EVERY_S = 5.0  # at the journal
TAIL_BYTES = 256 * 1024
MOST_BYTES = 64 * 2**20  # of code, as `shoal.launch.bundle` has it
FIRST_PORT, PORTS = 20_000, 10_000  # below those that Linux gives to outgoing connections


class Node:
    """Its methods are called one after another, on the actor's main thread, on which the agent's life depends: the
    kernel ends a tied process with the thread that started it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._agent: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._dropped = 0
        self._news = threading.Condition()
        self._drained = True
        self._journal: Path | None = None
        self._looked = 0.0
        self._step = 0

    def where(self) -> dict[str, Any]:
        """Where the others find it, should it be the first."""
        import ray

        return {"ip": ray.util.get_node_ip_address(), "port": _free_port(), "host": socket.gethostname()}

    def start(self, order: dict[str, Any], tar: bytes) -> str | None:
        """The agent, with the code in `tar`; a sentence when that cannot be."""
        try:
            _unpack(tar, Path(order["code"]))
        except OSError as e:
            return f"cannot write the code of the run to {order['code']} on {socket.gethostname()} ({e.strerror})"
        self._journal = Path(order["journal"]) if self._number == 0 else None
        try:
            self._agent = subprocess.Popen(
                ["bash", "-c", order["script"]],
                env={**os.environ, **order["env"]},
                cwd=order["code"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as e:
            return f"cannot start bash on {socket.gethostname()} ({e.strerror})"
        self._drained = False
        threading.Thread(target=self._read, args=(self._agent,), daemon=True).start()
        return None

    def poll(self, wait_s: float) -> dict[str, Any]:
        """What it has said since, and how it ended; waits so long for something to tell."""
        agent = self._agent
        with self._news:
            if not self._lines and not self._drained:
                self._news.wait(wait_s)
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._dropped = 0
        code = None
        if agent is not None and self._drained and not lines:
            with suppress(subprocess.TimeoutExpired):
                code = agent.wait(wait_s)
        elif agent is not None and agent.poll() is not None and not lines:
            with self._news:
                self._news.wait_for(lambda: self._drained, LAST_WORDS_S)
                self._drained = True
        return {"lines": lines, "dropped": dropped, "code": code, "step": self._furthest()}

    def tell(self, number: int) -> None:
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(number)

    def kill(self) -> None:
        """At once, without saving; its workers are tied to it."""
        if self._agent is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._agent.pid, signal.SIGKILL)

    def _read(self, agent: subprocess.Popen[bytes]) -> None:
        assert agent.stdout is not None
        for line in agent.stdout:
            with self._news:
                self._dropped += len(self._lines) == MOST_LINES
                self._lines.append(line.decode(errors="replace").rstrip("\r\n"))
                self._news.notify()
        with self._news:
            self._drained = True
            self._news.notify()

    def _furthest(self) -> int:
        """The furthest step in the run's journal: progress refills the budget of restarts."""
        if self._journal is not None and time.monotonic() > self._looked + LOOK_EVERY_S:
            self._looked = time.monotonic()
            self._step = max(self._step, _last_step(self._journal))
        return self._step


def _unpack(tar: bytes, folder: Path) -> None:
    """As `Bundle.unpack_at`, which is not here: whole or not at all, plain files alone, none outside of the folder."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, left = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent)), MOST_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:gz") as whole:
            for entry in whole:
                name, data = PurePosixPath(entry.name), whole.extractfile(entry) if entry.isreg() else None
                left -= max(entry.size, 0)
                if data is None or name.is_absolute() or ".." in name.parts or entry.size < 0 or left < 0:
                    raise tarfile.TarError(f"{entry.name} is no file in this folder")
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data.read())
                path.chmod(0o755 if entry.mode & 0o100 else 0o644)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _free_port() -> int:
    for _ in range(100):
        with socket.socket() as probe, suppress(OSError):
            port = FIRST_PORT + int.from_bytes(os.urandom(4)) % PORTS
            probe.bind(("", port))
            return port
    raise OSError(f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS} is free")


def _reached(record: dict[str, Any]) -> Any:
    """A step; of a batch the units that are over."""
    if record.get("kind") != "units":
        return record.get("step") if record.get("kind") == "step" else None
    done, failed = record.get("done"), record.get("failed")
    return done + failed if type(done) is int and type(failed) is int else None


def _last_step(journal: Path) -> int:
    try:
        with open(journal, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            step = _reached(record) if isinstance(record, dict) else None
            if type(step) is int and 0 <= step < 1 << 62:
                return step
    return 0
