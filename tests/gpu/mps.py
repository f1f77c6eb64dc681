"""NVIDIA's MPS, with folders of its own: the ranks of a GPU then run beside each other instead of taking turns.

Its clients share one fault domain, so what is said of killed and stopped ranks has to hold without it as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
START_S, QUIT_S = 20.0, 10.0
# A client of the driver alone: half a second, where torch takes five.
CLIENT = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
for code in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)):
    if code:
        raise SystemExit(f"CUDA error {code}")
"""


@dataclass(frozen=True)
class Mps:
    env: dict[str, str]  # of its clients; empty: there is none
    why_not: str = ""


@contextlib.contextmanager
def mps(control: str = CONTROL, client: str = CLIENT) -> Iterator[Mps]:
    """A daemon while this lasts; where there can be none it says why."""
    if shutil.which(control) is None:
        yield Mps({}, f"there is no {control} here")
        return
    folder = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))  # a short path: sockets are made there
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for name in env.values():
        Path(name).mkdir()
    try:
        why_not = _asked([control, "-d"], env) or _asked([sys.executable, "-c", client], env)
        yield Mps({}, why_not) if why_not else Mps(env)
    finally:
        _quit(control, env, folder)


def _asked(command: list[str], env: dict[str, str], said: str = "") -> str:
    """Why it failed; empty: it did not. What it prints goes to a file: the daemon keeps what it was given open."""
    with tempfile.TemporaryFile("w+") as out:
        told = {"input": said, "stdout": out, "stderr": out, "text": True}
        try:
            code = subprocess.run(command, env={**os.environ, **env}, timeout=START_S, **told).returncode
        except subprocess.TimeoutExpired:
            return f"{Path(command[0]).name} did not answer within {START_S:g} s"
        out.seek(0)
        words = out.read().strip().splitlines()
    return f"{Path(command[0]).name}: {words[-1] if words else f'exit code {code}'}" if code else ""


def _quit(control: str, env: dict[str, str], folder: Path) -> None:
    """Told to, then killed: by the id in its own folder."""
    pid_file = Path(env["CUDA_MPS_PIPE_DIRECTORY"]) / f"{CONTROL}.pid"
    pid = pid_file.read_text().strip() if pid_file.exists() else ""
    _asked([control], env, "quit\n")
    end = time.monotonic() + QUIT_S
    while _lives(pid) and time.monotonic() < end:
        time.sleep(0.1)
    if _lives(pid):
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return pid.isdecimal() and b"mps" in Path("/proc", pid, "cmdline").read_bytes()
    return False
