"""Checksums of a file's bytes, block by block: what is verified does not depend on how many tensors lie in the file.

A block has a fixed number of bytes, counted from the end of the file's header; the last one is shorter. A tensor's
slice lies in one block or in several, and shares the outer ones with its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128

# A checksum a block: 22 bytes of manifest for 1 MiB of state, 2 MB for 96 GB (8B and AdamW). It is also what a rank may
# have to read beyond its own part, twice a slice, when the next run is cut differently.
BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16
Raw = bytes  # `File` has a member of that name


@dataclass(frozen=True)
class File:
    """One file. Its header and its blocks cover every byte of it, so that no flipped bit is outside a checksum."""

    bytes: int
    header_bytes: int
    header_xxh3_128: str
    starts: Sequence[int]  # of the blocks: a range; in version 1 of the format a block is a slice, and this a list
    digests: Raw

    def blocks(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int, str]]:
        """(first byte, bytes, checksum) of the blocks that hold something of a stretch; of all unless told."""
        end = self.bytes if end is None else end
        first = max(0, bisect_right(self.starts, begin) - 1)
        for i in range(first, bisect_left(self.starts, end)):
            at = self.starts[i]
            stop = self.starts[i + 1] if i + 1 < len(self.starts) else self.bytes
            yield at, stop - at, self.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES].hex()

    def around(self, begin: int, end: int) -> tuple[int, int]:
        """(first byte, end) of the blocks that hold a stretch, which is not empty."""
        first, last = bisect_right(self.starts, begin) - 1, bisect_left(self.starts, end)
        return self.starts[first], self.starts[last] if last < len(self.starts) else self.bytes


def file_of(size: int, header_bytes: int, header_xxh3_128: str, block_bytes: int, digests: bytes) -> File:
    """A file whose blocks have a fixed size."""
    return File(size, header_bytes, header_xxh3_128, range(header_bytes, size, block_bytes), digests)


class Digests:
    """Takes the checksums of a stream of bytes, block by block."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._hash, self._room = xxh3_128(), block_bytes
        self._done: list[bytes] = []

    def update(self, data: memoryview) -> None:
        while data.nbytes:
            n = min(self._room, data.nbytes)
            self._hash.update(data[:n])
            self._room, data = self._room - n, data[n:]
            if not self._room:
                self._close()

    def finish(self) -> bytes:
        """Of all blocks, one after the other."""
        if self._room < self._block_bytes:
            self._close()
        return b"".join(self._done)

    def _close(self) -> None:
        self._done.append(self._hash.digest())
        self._hash, self._room = xxh3_128(), self._block_bytes
