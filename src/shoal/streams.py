"""Standard output and error, so that what becomes of them never changes what a process does.

A reader that goes away (`| head -1`), a stream that the shell closed (`>&-`) and a disk that is full (`> /dev/full`)
lose what is printed, and nothing else.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO


class _Deaf(io.FileIO):
    """A stream that takes everything. The first error is remembered, and what comes after it is not written: half of a
    report after a gap would look like a whole one."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        if self.lost is None:
            try:
                return super().write(data) or 0
            except BlockingIOError:
                raise
            except OSError as e:
                self.lost = e
        return size


def steady(stdout: bool = True) -> None:
    """From here on no write to standard error fails, nor one to standard output unless it is left as it is: for those
    who have nothing more to do once their reader is gone. For a process's own beginning."""
    _hold_open()
    if stdout:
        sys.stdout = _deaf(1, sys.stdout)
    elif sys.stdout is None:
        sys.stdout = _text(io.FileIO(1, "w", closefd=False), None)
    sys.stderr = _deaf(2, sys.stderr)


def finish() -> OSError | None:
    """Hands out what is still held back; says by what error standard output was lost, if it was."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError as e:
            # Python would flush it once more at the end, and make exit code 120 of the failure.
            sys.stdout = _text(open(os.devnull, "wb", buffering=0), None)  # noqa: SIM115  # for as long as the process
            return e
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.lost if isinstance(raw, _Deaf) else None


def reader_is_gone(e: OSError) -> bool:
    return e.errno in (errno.EPIPE, errno.ECONNRESET)


def _hold_open() -> None:
    """Else the next file that is opened would be number 1, the journal maybe, and be printed into."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free


def _deaf(number: int, before: TextIO | None) -> TextIO:
    if before is not None:
        before.flush()
    return _text(_Deaf(number, "w", closefd=False), before, number == 2 or getattr(before, "write_through", False))


def _text(raw: io.RawIOBase, before: TextIO | None, line_by_line: bool = False) -> TextIO:
    encoding, errors = (before.encoding, before.errors) if before is not None else ("utf-8", "backslashreplace")
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=line_by_line or raw.isatty())
