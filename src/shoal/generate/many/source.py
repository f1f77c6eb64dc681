"""A file of lines that may be larger than the memory: looked at once, then read from any line on."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shoal.errors import DataError, UsageError
from shoal.generate.many.item import MOST_LINE_BYTES
from shoal.plain_file import NotPlain, open_plain

BLOCK_BYTES = 1 << 20
JSON_LINES = (".jsonl", ".ndjson")
PACKED = {".gz": "gunzip", ".zst": "unzstd", ".xz": "unxz", ".bz2": "bunzip2", ".zip": "unzip"}
TABLES = (".parquet", ".arrow", ".json", ".csv", ".tsv")


@dataclass(frozen=True)
class Source:
    path: Path
    digest: str
    """Of all its bytes."""
    lines: int
    breaks: tuple[int, ...]
    """Line breaks before each block of BLOCK_BYTES."""
    state: tuple[int, int]
    """Size and time of change when it was looked at: what is still the same need not be read again."""

    @property
    def json_lines(self) -> bool:
        return self.path.suffix.lower() in JSON_LINES

    def part(self, index: int, count: int) -> range:
        """Lines from 0, so that the parts one after the other are the file."""
        return range(self.lines * index // count, self.lines * (index + 1) // count)

    def read(self, lines: range) -> Iterator[tuple[int, bytes]]:
        """Each of these lines with its number, from 0. Of one that is too long only so much as shows it."""
        if not lines:
            return
        with open(open_plain(self.path), "rb") as file:
            file.seek(self._begin_of(file.fileno(), lines.start))
            for number in lines:
                line = file.readline(MOST_LINE_BYTES + 1)
                rest = line
                while len(rest) > MOST_LINE_BYTES and not rest.endswith(b"\n"):
                    rest = file.readline(MOST_LINE_BYTES + 1)
                yield number, line
        self.refuse_change()

    def refuse_change(self) -> None:
        if _state(os.stat(self.path)) != self.state:
            raise DataError(f"{self.path} was changed while it was worked through: put it back as it was, and go on.")

    def _begin_of(self, fd: int, line: int) -> int:
        """The byte at which a line begins."""
        block = max(bisect.bisect_left(self.breaks, line) - 1, 0)
        left, at = (line - self.breaks[block] if self.breaks else 0), block * BLOCK_BYTES
        data = os.pread(fd, BLOCK_BYTES, at) if left else b""
        found = -1
        for _ in range(left):
            found = data.find(b"\n", found + 1)
            if found < 0:
                self.refuse_change()
                raise DataError(f"{self.path} was changed while it was worked through.")
        return at + found + 1


def looked_at(path: Path) -> Source:
    suffix = path.suffix.lower()
    if suffix in PACKED:
        raise UsageError(f"{path} is packed: unpack it first (`{PACKED[suffix]}`), as it is read from any line on.")
    if suffix in TABLES:
        raise UsageError(
            f"{path} is no file of lines: give text with one prompt a line, or JSON lines ({JSON_LINES[0]}) with "
            "'prompt', 'messages' or 'tokens'."
        )
    try:
        fd = open_plain(path)
    except NotPlain as e:
        raise UsageError(f"{e}; give a file with one prompt a line.") from None
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror}); give a file with one prompt a line.") from None
    digest, breaks, count, last = xxhash.xxh3_128(), list[int](), 0, b"\n"
    with open(fd, "rb", buffering=0) as file:
        state = _state(os.fstat(fd))
        while data := _block(file.fileno()):
            breaks.append(count)
            count += data.count(b"\n")
            digest.update(data)
            last = data[-1:]
    return Source(path, digest.hexdigest(), count + (last != b"\n"), tuple(breaks), state)


def _block(fd: int) -> bytes:
    """A whole one, but for the last: a read may bring less."""
    parts, left = [], BLOCK_BYTES
    while left and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _state(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
