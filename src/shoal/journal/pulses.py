"""Where a group's pulses lie: a folder in memory, so that no disk can hold up who writes them or who reads them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "pulse-"


def make_folder() -> Path:
    """A new one. Those of supervisors that were killed are removed with it."""
    prefix = f"{_PREFIX}{os.getpid()}-"
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=_swept_root()))
    except OSError:  # no such memory here (macOS), or none for us
        return Path(tempfile.mkdtemp(prefix=f"shoal-{prefix}"))


def folder_of(pid: int, name: str) -> Path:
    """The one that the children of a process share; it is removed some time after that has ended."""
    try:
        root = _swept_root()
    except OSError:
        root = Path(tempfile.gettempdir())
    folder = root / f"{_PREFIX}{pid}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _swept_root() -> Path:
    root = Path(os.environ.get("SHOAL_MEMORY") or "/dev/shm") / f"shoal-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in root.glob(f"{_PREFIX}*-*"):
        if not _alive(left.name.split("-")[1]):
            shutil.rmtree(left, ignore_errors=True)
    return root


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):
        return True
    return True
