"""The ends of a journal without its middle: what `ps`, the mirrors and a late follower need of a file of any length."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.journal.journal import Record, opened, read
from shoal.journal.record import parse

TAIL_BYTES = 64 * 1024
# Written by others beside the session's own records, also after its end; they say nothing about its state.
REMARKS = ("warning", "hang", "slow", "straggler", "exit", "evaluated")
MOST_TAIL_BYTES = 1 << 26

_OPEN = b'"open"'


def tail(path: Path, n_bytes: int = TAIL_BYTES) -> list[Record]:
    """The whole records within the last `n_bytes`."""
    with opened(path) as f:
        size = os.fstat(f.fileno()).st_size
        f.seek(max(0, size - n_bytes))
        if size > n_bytes:
            f.readline()  # the line we landed in the middle of
        offset = f.tell()
    return [record for record, _ in read(path, offset)]


def head(path: Path) -> Record | None:
    """The first record."""
    return next((record for record, _ in read(path)), None)


def telling(path: Path, n_bytes: int = TAIL_BYTES) -> list[Record]:
    """As `tail`, and as much more as it takes to find what is no remark: `shoal eval` may have added many."""
    while True:
        records = tail(path, n_bytes)
        if any(r.get("kind") not in REMARKS for r in records):
            return records
        if n_bytes >= min(path.stat().st_size, MOST_TAIL_BYTES):
            return records
        n_bytes *= 4


def is_closed(path: Path) -> bool:
    """Whether the newest session of the journal has ended in good order."""
    try:
        last = next((r for r in reversed(telling(path)) if r.get("kind") not in REMARKS), None)
    except FileNotFoundError:
        return False
    return last is not None and last.get("kind") == "close"


def newest_session_offset(path: Path, block_bytes: int = 1 << 20) -> int:
    """Where the newest session's `open` record begins; 0 when there is none. Reads backwards, block by block."""
    with opened(path) as f:
        end = os.fstat(f.fileno()).st_size
        rest = b""  # the beginning of the block after this one, up to its first line end
        while end > 0:
            begin = max(0, end - block_bytes)
            f.seek(begin)
            block = f.read(end - begin) + rest
            at = len(block)
            while (named := block.rfind(_OPEN, 0, at)) >= 0:  # few lines have the word at all
                at = block.rfind(b"\n", 0, named) + 1
                if (at > 0 or begin == 0) and _is_open(block[at : block.find(b"\n", named) + 1 or None]):
                    return begin + at
            rest, end = block[: block.find(b"\n") + 1], begin
    return 0


def _is_open(line: bytes) -> bool:
    record = parse(line)
    return record is not None and record["kind"] == "open"
