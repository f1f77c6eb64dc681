"""Where a group's pulses lie: a folder in memory, so that no disk can hold up who writes them or who reads them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "pulse-"


def make_folder() -> Path:
    """A new one. Those of supervisors that were killed are removed with it."""
    root = Path(os.environ.get("SHOAL_MEMORY") or "/dev/shm") / f"shoal-{os.getuid()}"
    prefix = f"{_PREFIX}{os.getpid()}-"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in root.glob(f"{_PREFIX}*-*"):
            if not _alive(left.name.split("-")[1]):
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    except OSError:  # no such memory here (macOS), or none for us
        return Path(tempfile.mkdtemp(prefix=f"shoal-{prefix}"))


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):
        return True
    return True
