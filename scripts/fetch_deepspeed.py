"""Fetches DeepSpeed for the slow tests, into a folder of its own: .cache/deepspeed-HASH, by the hash of its lock file.

It is not among the packages of every test, because other packages look whether it can be imported and act otherwise
then. The folder goes onto PYTHONPATH of those who want it; torch and what else DeepSpeed needs is the environment's. No
operator is built. It is built from its sources: half a minute the first time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = Path(__file__).with_name("deepspeed.lock")


def fetch() -> Path:
    """The folder, made first if it is not there yet."""
    folder = ROOT / ".cache" / f"deepspeed-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    work = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        _install(work)
        try:
            os.replace(work, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _install(folder: Path) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        sys.exit("fetch_deepspeed: uv is not here; `make setup` installs it.")
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--require-hashes"]
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    command = [*install, "--no-build-isolation", "--target", str(folder), "-r", str(LOCK)]
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    print(fetch())
