"""Where checkpoints are kept: named bytes under a root, on a disk here or in a bucket (`shoal.checkpoint.bucket`).

Names are relative and have slashes. What is missing is FileNotFoundError, what ends too early EOFError, what the
system refuses another OSError. A store that cannot be reached says so with a TransientError or a SetupError, so that
nobody takes a broken network for a broken checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from shoal.checkpoint import direct
from shoal.plain_file import open_plain, read_plain

MOST_WHOLE_BYTES = 1 << 30  # of a manifest: some million slices
Given = TypeVar("Given")
Done = TypeVar("Done")


class Store(Protocol):
    @property
    def where(self) -> str:
        """For people."""
        ...

    @property
    def readers(self) -> int:
        """How many reads at a time are worth while."""
        ...

    @property
    def compares(self) -> bool:
        """Whether it has compared what it took in with a checksum of what was sent: then nobody need read it back."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """The names directly in a folder; none where there is no such folder."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """The names and bytes of the files directly in a folder, by one listing; none where there is no such folder."""
        ...

    def size(self, name: str) -> int: ...
    def read(self, name: str) -> bytes: ...
    def read_into(self, name: str, at: int, into: memoryview) -> None: ...

    def put(self, name: str, data: bytes) -> None:
        """A small file, whole and durable when this returns; replaces."""
        ...

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """A large file, durable when this returns; replaces. The chunks stay as they are until then."""
        ...

    def staging(self, name: str) -> str:
        """The folder in which the files of checkpoint `name` are gathered, manifest last, until it is published."""
        ...

    def publish(self, name: str) -> None:
        """What has been gathered appears under its name, whole."""
        ...

    def remove(self, name: str) -> None:
        """A file, or a folder with all that is in it: a checkpoint is gone at once, or it is still whole."""
        ...

    def sweep(self) -> None:
        """Deletes what half-done removals have left. For one process, while nobody else removes."""
        ...


class Folder:
    """A folder on a disk; all ranks must see the same one."""

    readers = 4
    compares = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    @property
    def where(self) -> str:
        return str(self.root)

    def __repr__(self) -> str:
        return f"Folder({self.where})"

    def path(self, name: str) -> Path:
        return self.root / name

    def list(self, folder: str = "") -> list[str]:
        try:
            return os.listdir(self.root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(self.root / folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def size(self, name: str) -> int:
        return os.stat(self.root / name).st_size

    def read(self, name: str) -> bytes:
        return read_plain(self.root / name, MOST_WHOLE_BYTES)

    def read_into(self, name: str, at: int, into: memoryview) -> None:
        fd = open_plain(self.root / name)
        try:
            done = 0
            while done < into.nbytes:
                n = os.preadv(fd, [into[done:]], at + done)
                if not n:
                    raise EOFError(name)
                done += n
        finally:
            os.close(fd)

    def put(self, name: str, data: bytes) -> None:
        final = self.root / name
        final.parent.mkdir(parents=True, exist_ok=True)
        hidden = final.with_name(f".{final.name}.{os.getpid()}")
        try:
            with open(hidden, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            hidden.rename(final)
        except OSError:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)  # the disk may be full
            raise
        sync_folder(final.parent)

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # not overwritten: whoever still reads what an earlier try wrote may go on
        direct.write(path, chunks)

    def staging(self, name: str) -> str:
        return f".tmp-{name}"

    def publish(self, name: str) -> None:
        folder = self.root / self.staging(name)
        sync_folder(folder)
        os.rename(folder, self.root / name)  # refuses to replace one that is there: a name is written once
        sync_folder(self.root)

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():  # renamed before it is deleted: a crash half-way leaves a leftover, never a published half
            aside = path.with_name(f".old-{path.name.removeprefix('.tmp-')}")
            shutil.rmtree(aside, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        for name in self.list():
            if name.startswith(".old-"):
                shutil.rmtree(self.root / name, ignore_errors=True)


def at_once(store: Store, work: Callable[[Given], Done], items: Iterable[Given]) -> list[Done]:
    """Does something small for each of many files, as many at a time as pays: a bucket is far away, ranks are many."""
    given = list(items)
    if len(given) < 2:
        return [work(item) for item in given]
    with ThreadPoolExecutor(min(store.readers, len(given)), "shoal-files") as pool:
        return list(pool.map(work, given))


def sync_folder(path: Path) -> None:
    """Makes names that were created or renamed in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def has(store: Store, name: str) -> bool:
    try:
        store.size(name)
    except FileNotFoundError:
        return False
    return True


def store_of(root: str | os.PathLike[str] | Store) -> Store:
    """A store from what people give: a folder, or the address of a bucket."""
    if isinstance(root, str | os.PathLike):
        text = str(root).removeprefix("file://")  # a disk is better used as one: a bucket on it would not fsync
        if "://" in text:
            from shoal.checkpoint.bucket import Bucket

            return Bucket(text)
        return Folder(text)
    return root
