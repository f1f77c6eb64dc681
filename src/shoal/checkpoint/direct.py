"""Large files to the disk and back, past the page cache (O_DIRECT) where the file system can do that.

The disk fetches the bytes from memory by itself. Measured on ext4, 600 MB: 0.03 s of CPU time instead of 0.15 to 1.0,
not slower, and nothing that training reads is pushed out of memory for a file that nobody is going to read. And what is
read back comes from the disk, not from the memory that it was written from. No torch here.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shoal.plain_file import open_plain

BUFFER_BYTES = 8 << 20
AHEAD = 2  # reads under way
BLOCK_BYTES = 4096  # memory, place in the file and length must be multiples of it (some disks are content with 512)


def write(path: Path, chunks: Iterable[memoryview]) -> None:
    """Writes a file; it is on disk when this returns."""
    fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        held = 0  # bytes in the buffer
        for chunk in chunks:
            data = chunk if held else _write_in_place(fd, chunk)
            while data.nbytes:
                n = min(data.nbytes, BUFFER_BYTES - held)
                buffer[held : held + n] = data[:n]
                held, data = held + n, data[n:]
                if held == BUFFER_BYTES:
                    _write_all(fd, buffer)
                    held = 0
        _through_the_cache(fd)  # the end of the file is no whole block
        _write_all(fd, buffer[:held])
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path, at: int, end: int) -> Iterator[memoryview]:
    """The bytes from `at` to `end`, in order; each piece is good until the next. EOFError where the file is shorter.

    The next pieces are on their way while the caller looks at this one, so that the disk always has something to do.
    """
    os.close(open_plain(path))  # O_DIRECT is no way to ask what it is
    fd = _open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        places = range(at - at % BLOCK_BYTES, end, BUFFER_BYTES)
        buffers = itertools.cycle([memoryview(mmap.mmap(-1, BUFFER_BYTES)) for _ in places[: AHEAD + 1]])
        ahead: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(AHEAD, "shoal-read-ahead") as threads:  # they start when there is a second piece
            if len(places) == 1:
                yield _read_all(fd, places[0], end, next(buffers))[at - places[0] :]
                return
            asked = iter(places)
            for place in places:
                for another in itertools.islice(asked, 1 + AHEAD - len(ahead)):
                    ahead.append(threads.submit(_read_all, fd, another, end, next(buffers)))
                yield ahead.popleft().result()[max(at - place, 0) :]
    finally:
        os.close(fd)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC, 0o666)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o666)


def _write_in_place(fd: int, data: memoryview) -> memoryview:
    """Writes the whole blocks of what lies in memory as the disk wants it. Returns what is left."""
    done, whole = 0, data.nbytes - data.nbytes % BLOCK_BYTES
    try:
        while done < whole:
            done += os.write(fd, data[done : min(whole, done + BUFFER_BYTES)])
    except OSError as e:
        if e.errno != errno.EINVAL:  # else it does not begin at a block
            raise
    return data[done:]


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        try:
            done += os.write(fd, data[done:])
        except OSError as e:
            if e.errno != errno.EINVAL or not _through_the_cache(fd):
                raise


def _read_all(fd: int, at: int, end: int, buffer: memoryview) -> memoryview:
    """Fills the buffer from `at` on, in whole blocks; as far as `end`, if that comes first."""
    count, done = min(end - at, buffer.nbytes), 0
    while done < count:
        try:
            n = os.preadv(fd, [buffer[done : -(-count // BLOCK_BYTES) * BLOCK_BYTES]], at + done)
        except OSError as e:
            if e.errno != errno.EINVAL or not _through_the_cache(fd):
                raise
            continue
        if not n:
            raise EOFError("the file is too short")
        done += n
    return buffer[:count]


def _through_the_cache(fd: int) -> bool:
    """From here on as usual; False where it was so before."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
    return bool(flags & getattr(os, "O_DIRECT", 0))
