"""A folder of downloaded blobs with a size limit, shared by all processes of a machine.

Blobs are named by their content, written under another name and renamed, so a reader finds a whole one or none. Readers
open, read and close: when another process deletes the blob meanwhile, what was opened stays readable. So no blob is
ever "in use" and the limit can always be kept; a reader that comes too late downloads again.
One file is shared, with a lock: how many bytes are in the folder, and how many more each process may write. A process
takes room for many blobs at a time, and holds the lock for no longer than that; it writes beside the others.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal import values
from shoal.errors import SetupError, SpecError
from shoal.plain_file import NotPlain, open_plain

SMALLEST_BYTES = 10_000_000
# Free a tenth at once: counting the folder costs a stat a blob, so it should be rare.
_KEPT = 0.9
_ROOM = 1 / 1024  # of the limit, taken at a time
_MOST_COUNT = 1 << 20
# The last use is the file's time; to set it on every read would double the cost of a read.
_TOUCH_AFTER_S = 30.0


@dataclass
class _Count:
    used: int  # bytes: what is there, and the room that was taken
    room: dict[int, int] = field(default_factory=dict)  # process → bytes that it may still write


class Cache:
    def __init__(self, folder: Path, limit_bytes: int, touch_after_s: float = _TOUCH_AFTER_S) -> None:
        if limit_bytes < SMALLEST_BYTES:
            raise SpecError(
                f"a cache of {limit_bytes:,} bytes is too small to hold one batch: set data.cache_gb to "
                f"{SMALLEST_BYTES / 1e9:g} or more."
            )
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._touch_after_s = touch_after_s
        self._room, self._taking = 0, threading.Lock()  # bytes that are counted and not yet written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked() as lock:
                self._set_count(lock, self._count(lock))
        except OSError as e:
            raise self._unusable(e) from None

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def has(self, key: str) -> bool:
        return self.path(key).exists()

    def read(self, key: str, size: int, offset: int = 0, length: int | None = None) -> bytes | None:
        """A part of the blob, or None when the cache has no blob of that name and size."""
        try:
            fd = open_plain(self.path(key))
        except (FileNotFoundError, NotPlain):
            return None
        try:
            status = os.fstat(fd)
            if status.st_size != size:
                return None
            if time.time() - status.st_mtime > self._touch_after_s:
                os.utime(fd)
            return os.pread(fd, size if length is None else length, offset)
        finally:
            os.close(fd)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Keep the blob; those unused for longest go when it would not fit. One larger than the limit is not kept."""
        if len(data) > self.limit_bytes:
            return
        path = self.path(key)
        temporary = path.with_name(f"{key}.{threading.get_ident()}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._take(len(data))
            temporary.write_bytes(data)
            with suppress(FileNotFoundError):  # a process that does not see ours (a container's) took it for left over
                os.replace(temporary, path)
        except OSError as e:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise self._unusable(e) from None

    def _take(self, size: int) -> None:
        """Room for so many bytes: counted before they are there, so a kill in between can only free space too early."""
        with self._taking:
            if self._room < size:
                self._take_more(max(size, int(self.limit_bytes * _ROOM)))
            self._room -= size

    def _take_more(self, room: int) -> None:
        with self._locked() as lock:
            count = self._count(lock)
            others = sum(count.room.values()) - count.room.get(os.getpid(), 0)
            if count.used + room > self.limit_bytes:
                count.used = self._evict(int(self.limit_bytes * _KEPT) - room - others) + others
            count.used += room
            self._room += room
            count.room[os.getpid()] = self._room
            self._set_count(lock, count)

    def touch(self, key: str) -> None:
        """The blob was used by other means than `read`."""
        with suppress(FileNotFoundError):
            os.utime(self.path(key))

    def used_bytes(self) -> int:
        """What is there now, counted."""
        return sum(size for _, size, _ in self._blobs())

    def _evict(self, target_bytes: int) -> int:
        """Delete the least recently used until at most `target_bytes` are left. The lock is held."""
        blobs = sorted(self._blobs())
        used = sum(size for _, size, _ in blobs)
        for _, size, path in blobs:
            # A temporary file is being written, or is what a killed writer left.
            if not _alive(_writer(path)) if path.endswith(".tmp") else used > target_bytes:
                Path(path).unlink(missing_ok=True)
                used -= size
        return used

    def _blobs(self) -> Iterator[tuple[float, int, str]]:
        """(last use, bytes, path) of every file; ones that vanish meanwhile are left out."""
        for group in os.scandir(self.folder):
            if not group.is_dir():
                continue
            for entry in os.scandir(group.path):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                yield status.st_mtime, status.st_size, entry.path

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """One process and thread at a time. The kernel frees the lock of a process that dies."""
        fd = open_plain(self.folder / "lock", os.O_RDWR | os.O_CREAT)  # the folder may have been deleted meanwhile
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _count(self, lock: int) -> _Count:
        """As the file has it; counted anew for a new folder, and after a power cut that left nonsense."""
        try:
            held = values.read_json(os.pread(lock, _MOST_COUNT, 0))
            if type(held) is int:  # of an earlier version, which took no room
                return _Count(values.whole(held))
            told = values.field(held, "room", values.by_name(values.whole))
            room = {pid: size for text, size in told.items() if _alive(pid := _pid(text))}
            return _Count(values.field(held, "used", values.whole), room)
        except values.BadValue:
            return _Count(self.used_bytes())

    def _set_count(self, lock: int, count: _Count) -> None:
        text = json.dumps({"used": count.used, "room": count.room}).encode()
        os.pwrite(lock, text, 0)
        os.ftruncate(lock, len(text))

    def _unusable(self, e: OSError) -> SetupError:
        return SetupError(
            f"the data cache {self.folder} cannot be used: {e.strerror}; make room there, or set data.cache_dir to "
            "another folder or data.cache_gb to less."
        )


def _pid(text: str) -> int:
    return values.pid(int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0)


def _writer(path: str) -> int:
    """Who writes a temporary file; 0, which is nobody, where its name does not say."""
    try:
        return _pid((path.split(".")[-2:-1] or [""])[0])
    except values.BadValue:
        return 0


def _alive(pid: int) -> bool:
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's
    return True
