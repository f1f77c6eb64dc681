"""A folder of downloaded blobs with a size limit, shared by all processes of a machine.

Blobs are named by their content, written under another name and renamed, so a reader finds a whole one or none. Readers
open, read and close: when another process deletes the blob meanwhile, what was opened stays readable. So no blob is
ever "in use" and the limit can always be kept; a reader that comes too late downloads again.
Writers take turns by a lock on a file, which also holds the one shared number: the bytes in the folder.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import SetupError, SpecError

SMALLEST_BYTES = 10_000_000
# Free a tenth at once: counting the folder costs a stat a blob, so it should be rare.
_KEPT = 0.9
# The last use is the file's time; to set it on every read would double the cost of a read.
_TOUCH_AFTER_S = 30.0


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
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked() as lock:
                self._set_used(lock, self._used(lock))
        except OSError as e:
            raise self._unusable(e) from None

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def has(self, key: str) -> bool:
        return self.path(key).exists()

    def read(self, key: str, size: int, offset: int = 0, length: int | None = None) -> bytes | None:
        """A part of the blob, or None when the cache has no blob of that name and size."""
        try:
            fd = os.open(self.path(key), os.O_RDONLY)
        except FileNotFoundError:
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
        temporary = path.with_name(f"{key}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as lock:
                used = self._used(lock)
                if used + len(data) > self.limit_bytes:
                    used = self._evict(int(self.limit_bytes * _KEPT) - len(data))
                # Counted before it is there: a kill in between can only make us free space too early.
                self._set_used(lock, used + len(data))
                temporary.write_bytes(data)
                os.replace(temporary, path)
        except OSError as e:
            raise self._unusable(e) from None

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
            # With the lock held nobody is writing: a temporary file is what a killed or failed writer left.
            if used > target_bytes or path.endswith(".tmp"):
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
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _used(self, lock: int) -> int:
        try:
            return int(os.pread(lock, 32, 0))
        except ValueError:  # a new folder, or a power cut that left the number empty
            return self.used_bytes()

    def _set_used(self, lock: int, used: int) -> None:
        os.pwrite(lock, f"{used:<32}".encode(), 0)

    def _unusable(self, e: OSError) -> SetupError:
        return SetupError(
            f"the data cache {self.folder} cannot be used: {e.strerror}; make room there, or set data.cache_dir to "
            "another folder or data.cache_gb to less."
        )
