"""A node's folder in RAM (tmpfs): where it is, who uses it, and when it goes. No torch here.

    $SHOAL_MEMORY or /dev/shm
      shoal-1000/                  this user's, closed to others
        myrun-1f0c9a3e/            the run, by the path of its directory
          node-0/                  a node; a machine has one, unless several nodes are played on it
            owner.json             held with a shared lock by the workers and persisters that use the folder
            keeper.json            which keeper serves it
            step-…-term-…/         what this node's ranks have left (`shoal.checkpoint.memory.generations`)
            copies/step-…-term-…/  what another node's ranks have sent

What is in it outlives the processes and not the machine. The kernel drops the locks of a process that dies, however it
dies, in whatever container: no pid is ever compared with another.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from shoal.errors import SetupError

OWNER = "owner.json"
ABANDONED_S = 3600.0
_GONE = ".gone-"


def memory_folder(run: str | os.PathLike[str], node: int) -> Path:
    """Where a node keeps the snapshots of the run in that directory."""
    path = Path(os.path.abspath(run))
    root = Path(os.environ.get("SHOAL_MEMORY") or "/dev/shm")
    return root / f"shoal-{os.getuid()}" / f"{path.name}-{xxh3_64_hexdigest(os.fsencode(path))[:8]}" / f"node-{node}"


class Hold:
    """This process uses a folder, until it closes this or ends."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder, self._fd = folder, fd

    def close(self) -> None:
        os.close(self._fd)


def hold(folder: Path) -> Hold:
    """Makes the folder if need be. From now on nobody sweeps it away."""
    _make(folder)
    while True:
        fd = _open_owner(folder)
        fcntl.flock(fd, fcntl.LOCK_SH)  # waits for a sweep that is just going on
        if _is_at(fd, folder / OWNER):
            break
        os.close(fd)  # … and has taken the folder away
        _make(folder)
    if not os.fstat(fd).st_size:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "started": round(time.time(), 3)}
        os.pwrite(fd, json.dumps(who).encode() + b"\n", 0)  # for people; the lock is what counts
    return Hold(folder, fd)


def sweep(mine: Path, older_than_s: float = ABANDONED_S) -> list[Path]:
    """Deletes the folders that other runs have left on this machine: nobody uses them, nothing is new in them."""
    for leftover in mine.parent.parent.glob(f"*/{_GONE}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    others = [folder for folder in mine.parent.parent.glob("*/node-*") if folder.parent != mine.parent]
    gone = []
    for folder in others:
        with contextlib.suppress(OSError):  # another start sweeps at the same time
            if time.time() - _changed_at(folder) > older_than_s and remove_if_unused(folder):
                gone.append(folder)
    return gone


def forget(folder: Path) -> None:
    """The run has ended in order: nothing of it need stay in memory. Its keeper notices, and leaves."""
    _remove(folder)
    for other in folder.parent.glob("node-*"):  # of an earlier start, under another number
        with contextlib.suppress(FileNotFoundError):
            remove_if_unused(other)


def _remove(folder: Path) -> None:
    aside = folder.with_name(f"{_GONE}{folder.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
    for parent in (folder.parent, folder.parent.parent):
        with contextlib.suppress(OSError):  # other nodes, other runs
            parent.rmdir()


@contextmanager
def unused(folder: Path) -> Iterator[bool]:
    """Whether nobody uses a folder; until the block ends nobody begins to."""
    fd = _open_owner(folder)
    try:
        yield _locked(fd)
    finally:
        os.close(fd)


def remove_if_unused(folder: Path) -> bool:
    """Whether nobody used it; then it is gone."""
    with unused(folder) as nobody:
        if nobody:
            _remove(folder)
        return nobody


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _open_owner(folder: Path) -> int:
    return os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _changed_at(folder: Path) -> float:
    """When something was last written there. Pages that are written through a mapping leave no time; names do."""
    return max(path.stat().st_mtime for path in (folder, *folder.glob("*"), *folder.glob("*/*")))


def _make(folder: Path) -> None:
    """With a root that is this user's alone: everybody may write to /dev/shm, and what is found there is restored."""
    root = folder.parent.parent
    root.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    about = root.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise SetupError(
            f"{root} is not a folder of this user alone, so that others could change what is restored from it: "
            "remove it, or set SHOAL_MEMORY to another folder in memory."
        )
    folder.mkdir(parents=True, exist_ok=True)
