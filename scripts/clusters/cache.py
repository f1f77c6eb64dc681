"""Where what the clusters need is kept: outside the checkout, keyed by version, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKS = Path(__file__).with_name("locks")


def root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One at a time; the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def making(folder: Path) -> Iterator[Path | None]:
    """An empty folder that becomes `folder` when the block ends well; None where it is there already.

    Two that want the same one make it once: the second waits for the first.
    """
    if folder.is_dir():
        yield None
        return
    with locked(folder):
        if folder.is_dir():
            yield None
            return
        work = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(work, ignore_errors=True)  # of one that was killed
        work.mkdir()
        try:
            yield work
            os.replace(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def install(lock: str, target: Path) -> None:
    """Unpacks the one package of a lock file, pinned by hash, without its dependencies and into no environment."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        sys.exit("clusters: uv is not here; `make setup` installs it.")
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--target", str(target), "-r", str(LOCKS / f"{lock}.lock")], check=True)
