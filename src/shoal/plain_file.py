"""The one way to open a file that somebody else may have put there: plain files only, never waiting, never too much.

A FIFO would make `open` wait for a writer for ever, a device may do anything when it is read, and a file that was
swapped for a huge one would fill the memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from shoal import values
from shoal.values import inside

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotPlain(OSError):
    """Something else than a file of a sane size stands in the place of one. (An OSError: who can live with a file that
    cannot be read can live with this.)"""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(errno.EBADF, what, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_plain(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor, to read from unless `flags` say more. O_NONBLOCK keeps the open of a FIFO from waiting; on a plain
    file it has no effect."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    except OSError as e:  # a socket cannot be opened at all
        if e.errno == errno.ELOOP:
            raise NotPlain(path, "is a link that leads back to itself, where a file should be") from None
        if (what := _what(os.stat(path).st_mode)) is not None:
            raise NotPlain(path, f"is {what}, where a file should be") from None
        raise
    if (what := _what(os.fstat(fd).st_mode)) is not None:
        os.close(fd)
        raise NotPlain(path, f"is {what}, where a file should be")
    return fd


def read_plain(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The whole file, if it has at most so many bytes. What is appended meanwhile is left out."""
    fd = open_plain(path)
    with open(fd, "rb") as file:
        if (size := os.fstat(fd).st_size) > most_bytes:
            raise NotPlain(path, f"has {size:,} bytes, where at most {most_bytes:,} are expected")
        return file.read(size)


def read_words(path: str | os.PathLike[str], most_bytes: int = 1 << 20) -> str:
    """A small file of text; what is no text in it is shown as such."""
    return read_plain(path, most_bytes).decode(errors="replace")


def read_object(
    path: str | os.PathLike[str], most_bytes: int = values.MOST_BYTES, most_parts: int = values.MOST_PARTS
) -> dict[str, Any]:
    """The JSON object that a small file holds. OSError, or `BadValue` (a ValueError) that names the file."""
    with inside(os.fspath(path)):
        return values.read_object(read_plain(path, most_bytes), most_parts=most_parts, most_bytes=most_bytes)


def is_plain(path: Path) -> bool:
    """Whether there is a file, and nothing else in its place."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _what(mode: int) -> str | None:
    """In words, what stands there; None for a plain file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no plain file")
