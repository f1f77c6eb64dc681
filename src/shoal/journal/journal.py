"""The journal: one JSON line a fact, appended and never changed. Every view of a run is derived from it.

Writers append a whole line with one write to a file opened O_APPEND, so the supervisor and rank 0 can share it.
Readers pass over what is no record (`shoal.journal.record`) and stop with a clear error at a newer version.
Credentials inside addresses are masked on the way in. The record kinds are in docs/reference/journal.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import SetupError
from shoal.journal.record import Odd, Record, parse
from shoal.masking import mask
from shoal.plain_file import NotPlain, open_plain

__all__ = ["Journal", "Odd", "Record", "read", "records"]

VERSION = 1
MOST_LINE_BYTES = 16 << 20
LONG_BYTES = 1 << 20  # a longer journal has an index (`shoal.journal.index`); a shorter one is read in 0.05 s


class Journal:
    """An open journal, to write to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._torn = False
        self._held: list[bytes] = []
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a crash tore the last line: keep it from swallowing the next one

    def append(self, kind: str, **fields: Any) -> Record:
        record = {"v": VERSION, "kind": kind, "t": round(time.time(), 6), **fields}
        self._write(_line(record))
        return record

    def note(self, kind: str, **fields: Any) -> None:
        """For those who must go on: what a full disk does not take is held, and written before the next record."""
        self._held.append(_line({"v": VERSION, "kind": kind, "t": round(time.time(), 6), **fields}))
        with contextlib.suppress(OSError):
            while self._held:
                self._write(self._held[0])
                del self._held[0]

    def _write(self, line: bytes) -> None:
        written = os.write(self._fd, b"\n" + line if self._torn else line)
        self._torn = written < len(line)
        if self._torn:  # the disk is full; the half line must not swallow the next record
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def read(path: Path, offset: int = 0, odd: Odd | None = None) -> Iterator[tuple[Record, int]]:
    """Records from a byte offset on, each with the offset after it, so that a follower can stop and go on. The lines
    that are none are passed over, and counted in `odd`."""
    with opened(path) as f:
        for record, begin, after in lines(f, path, offset):
            if record is not None:
                yield record, after
            elif odd is not None:
                odd.add(begin)


def lines(f: BinaryIO, path: Path, offset: int) -> Iterator[tuple[Record | None, int, int]]:
    """The whole lines of an open journal, each with the offsets of its begin and end; None for one that is no record.
    Empty ones are left out."""
    f.seek(offset)
    while line := f.readline(MOST_LINE_BYTES):
        if not line.endswith(b"\n"):
            if len(line) < MOST_LINE_BYTES:
                return  # still being written, or torn by a crash
            while line and not line.endswith(b"\n"):  # no record is so long
                offset += len(line)
                line = f.readline(MOST_LINE_BYTES)
        begin, offset = offset, offset + len(line)
        record = parse(line)
        if record is not None and record.get("v", 0) > VERSION:
            newer = f"a newer Shoal (journal version {record['v']})"
            raise SetupError(f"{path} was written by {newer}; upgrade Shoal to read it.")
        if record is not None or line.strip():
            yield record, begin, offset


def records(path: Path, odd: Odd | None = None) -> list[Record]:
    return [record for record, _ in read(path, odd=odd)]


def opened(path: Path) -> BinaryIO:
    """A journal, to read: a FIFO or a device in its place is refused, not waited for."""
    try:
        return open(open_plain(path), "rb")
    except NotPlain as e:
        raise SetupError(f"{e}: move it away.") from None


def _line(record: Record) -> bytes:
    return (json.dumps(_clean(record), separators=(",", ":"), allow_nan=False) + "\n").encode()


def _clean(value: Any) -> Any:
    """What JSON and a reader can take: NaN and infinity become the string that says so, secrets are masked."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value
