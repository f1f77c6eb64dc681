"""A copy of the folder that a script runs in: what a measured run writes there is none of its owner's.

Large files are linked, not copied; large checkpoints are left out, for a run that goes on would write over them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shoal.errors import UsageError

MOST_COPIED = 64 << 20  # bytes of a file; a larger one is data
MOST_TOTAL = 4 << 30
MOST_FILES = 50_000
_NEVER = frozenset((".git", ".venv", "venv", "node_modules", "__pycache__", "runs", "wandb", "mlruns", ".shoal"))
_SAVED = frozenset((".pt", ".pth", ".ckpt", ".safetensors", ".tar", ".distcp"))


def shadow(folder: Path, into: Path) -> None:
    total = count = 0
    walked = {os.path.realpath(folder)}
    for place, names, files in os.walk(folder, followlinks=True):
        names[:] = [name for name in names if name not in _NEVER and _first_time(Path(place) / name, walked)]
        here = into / Path(place).relative_to(folder)
        if Path(place) == into or into in Path(place).parents:
            names.clear()
            continue
        here.mkdir(parents=True, exist_ok=True)
        for name in files:
            file = Path(place) / name
            if not file.is_file():  # a FIFO, a socket, a link to nowhere
                continue
            count, size = count + 1, file.stat().st_size
            if size > MOST_COPIED:
                if file.suffix not in _SAVED and not _is_archive(file):
                    (here / name).symlink_to(file.resolve())
                continue
            total += size
            if count > MOST_FILES or total > MOST_TOTAL:
                raise UsageError(
                    f"{folder} holds more than {MOST_FILES:,} files or {MOST_TOTAL >> 30} GiB of small ones, and a "
                    "measured or drilled script runs in a copy of it; start that from a folder with less in it."
                )
            shutil.copy2(file, here / name)


def _first_time(folder: Path, walked: set[str]) -> bool:
    """Whether a folder was not copied yet. Links are followed (`data` often is one), and may lead round in circles."""
    there = os.path.realpath(folder)
    above = folder.is_symlink() and any(one.startswith(there.rstrip("/") + "/") for one in walked)
    if there in walked or above:
        return False
    walked.add(there)
    return True


def _is_archive(file: Path) -> bool:
    with open(file, "rb") as f:
        return f.read(4) == b"PK\x03\x04"
