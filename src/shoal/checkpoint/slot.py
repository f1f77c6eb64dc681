"""A rank's file in memory, used again for every save. No torch here.

It lies in a folder of the node's RAM (tmpfs), laid out byte for byte as it will lie on disk, so that what has been
copied into it is a checkpoint's part already: it outlives the worker, and a restart on this node can read it.
Where the tmpfs is too small for that (a container's 64 MB), it is anonymous memory: still a save in the background,
only not one that outlives the worker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from shoal.checkpoint.names import Name, part_file, rank_file

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: the first snapshot shall not wait for a million page faults


@dataclass
class Slot:
    folder: Path | None  # None: anonymous
    rank: int
    map: mmap.mmap
    fd: int
    path: Path = field(default=Path())  # where other processes find it
    name: Name | None = None  # what it holds, whole
    busy: bool = False  # being filled, or being written out
    _hidden: Path = field(default=Path())

    @classmethod
    def create(cls, folder: Path, rank: int, index: int, size: int) -> Slot:
        """In the folder of the node's memory; OSError where that has no room."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        hidden = folder / f".slot-{rank:05d}-{index}-{os.getpid()}"
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(folder, rank, _mapped(fd, size), fd, hidden, _hidden=hidden)
        except OSError:
            os.close(fd)
            hidden.unlink()
            raise

    @classmethod
    def anonymous(cls, rank: int, index: int, size: int) -> Slot:
        fd = os.memfd_create(f"shoal-slot-{rank}-{index}")
        os.ftruncate(fd, size)
        return cls(None, rank, _mapped(fd, size), fd)

    def begin(self) -> None:
        """Before it is filled: what it held is no longer to be found."""
        self.busy = True
        if self.folder is not None and self.name is not None:
            home = self.folder / str(self.name)
            (home / part_file(self.rank)).unlink(missing_ok=True)
            self._move(self._hidden)
            self._leave(home)
        self.name = None

    def seal(self, name: Name) -> None:
        """Filled: it is the file of that checkpoint, and counts once its part lies beside it."""
        self.name = name
        if self.folder is not None:
            home = self.folder / str(name)
            with contextlib.suppress(FileNotFoundError):
                home.mkdir(exist_ok=True)
            self._move(home / rank_file(self.rank))

    def _move(self, to: Path) -> None:
        """Somebody may have cleaned up the memory of the machine: the pages are still ours, only not to be found."""
        try:
            self.path = self.path.rename(to)
        except FileNotFoundError:
            self.folder = None

    def close(self) -> None:
        """Gives the memory back."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                if self.name is not None:
                    (self.folder / str(self.name) / part_file(self.rank)).unlink(missing_ok=True)
                self.path.unlink(missing_ok=True)
                if self.name is not None:
                    self._leave(self.folder / str(self.name))
        os.close(self.fd)

    @staticmethod
    def _leave(home: Path) -> None:
        """The last rank to leave a folder takes it away."""
        with contextlib.suppress(OSError):
            left = os.listdir(home)
            if left == ["extra.json"]:
                (home / "extra.json").unlink()
            home.rmdir()


def _mapped(fd: int, size: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, size)
    with contextlib.suppress(OSError):
        mapped.madvise(_POPULATE_WRITE)
    return mapped
