"""What rank 0 of a script prints, as it comes: whoever runs a script wants to see that. It is all in the log."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

from shoal import readable
from shoal.plain_file import open_plain

BLOCK_BYTES = 256 << 10  # at one look
MOST_BEHIND = 4 << 20  # whoever prints more than a terminal takes is shown the end of it
MOST_LINE = 8 << 10  # characters; a longer line is shown in pieces


class Echo:
    def __init__(self, log: Path) -> None:
        self._log, self._at, self._half = log, 0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lines(self, last: bool = False) -> Iterator[str]:
        """Those that have come since the last call. `last`: also one that has no end."""
        while True:
            block = self._read()
            if skipped := self._skipped:
                yield f"… {readable.size(skipped)} more, in {self._log}"
            *whole, self._half = (self._half + self._decoder.decode(block)).split("\n")
            for line in whole:
                yield from _shown(line)
            while len(self._half) > MOST_LINE:
                yield self._half[:MOST_LINE]
                self._half = self._half[MOST_LINE:]
            if not last or len(block) < BLOCK_BYTES:
                break
        if last and self._half:
            yield from _shown(self._half)
            self._half = ""

    def _read(self) -> bytes:
        self._skipped = 0
        try:
            with open(open_plain(self._log), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size - self._at > MOST_BEHIND:
                    self._skipped = size - BLOCK_BYTES // 4 - self._at
                    self._at += self._skipped
                file.seek(self._at)
                block = file.read(BLOCK_BYTES)
        except OSError:
            return b""
        self._at += len(block)
        return block


def _shown(line: str) -> Iterator[str]:
    """Of a line that was written over itself (a progress bar), what stood there last; a long one in pieces."""
    line = line.rstrip("\r").rpartition("\r")[2]
    yield from (line[at : at + MOST_LINE] for at in range(0, len(line) or 1, MOST_LINE))
