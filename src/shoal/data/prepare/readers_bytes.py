"""Bytes in, records out, in bounded memory: ranges of files, gzip and zstandard streams, and what separates records.

Nothing here believes what a file claims: what a packed file gives comes out in blocks of about 1 MiB, a record grows up
to its limit and is then thrown away as it is read, and a file that grows far more than text does when it is unpacked is
refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shoal.data.broken import Broken
from shoal.plain_file import open_plain

if TYPE_CHECKING:
    from shoal.data.prepare.units import Piece, Reading

BLOCK_BYTES = 1 << 20
# Small blocks are joined to at least this: a stream of single bytes must not become as many objects.
LEAST_BLOCK_BYTES = 1 << 16
# After a member of a gzip file so much is tried first, as what follows a member is copied.
MEMBER_BYTES = 1 << 12
# Plain text without separators is one document a file; a longer one is cut here. No model sees 16 MiB in one window,
# and a file of that size is a corpus rather than a document.
MAX_DOCUMENT_BYTES = 1 << 24
CUT_SEARCH_BYTES = 1 << 20


def file_blocks(path: str, start: int, stop: int, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    with open(open_plain(path), "rb") as f:
        f.seek(start)
        left = stop - start
        while left:
            block = f.read(min(BLOCK_BYTES, left))
            if not block:
                raise Broken("became shorter while it was read")
            left -= len(block)
            on_bytes(len(block))
            yield block


def unpacked(blocks: Iterator[bytes], packing: str, growth: Growth, most_window_bytes: int) -> Iterator[bytes]:
    if packing == "gz":
        return _gathered(_gunzip(blocks), growth)
    if packing == "zst":
        from shoal.data.prepare.readers_zstd import unzstd

        return _gathered(unzstd(blocks, most_window_bytes), growth)
    return blocks


class Growth:
    """Counts what came out of a packed or encoded file. Text packs to a tenth, the log of a machine to a fiftieth; what
    packs to less than a two-hundredth is nothing to learn from, and may be made to fill memory, disk and days."""

    FREE_BYTES = 1 << 26  # a small file may be as repetitive as it likes

    def __init__(self, size_bytes: int, file_bytes: int, most: int) -> None:
        """Of a part of a file: so much of its growth as the part is of its size."""
        self._left = max(self.FREE_BYTES, file_bytes * most) * size_bytes // max(file_bytes, 1)
        self._most = most

    @classmethod
    def of(cls, piece: Piece, reading: Reading) -> Growth:
        return cls(piece.size_bytes, piece.input.size_bytes, reading.max_growth)

    def add(self, out_bytes: int) -> None:
        self._left -= out_bytes
        if self._left < 0:
            raise Broken(
                f"holds more than {self._most:,} times its size, as no text does",
                f"if that is meant, allow it with --max-growth {self._most * 100}",
                "grows too much",
            )


def _gathered(blocks: Iterator[bytes], growth: Growth) -> Iterator[bytes]:
    small = bytearray()
    broken: Broken | None = None
    while broken is None:
        try:
            block = next(blocks, None)
            growth.add(len(block or b""))
        except Broken as e:  # what could be read before comes first
            block, broken = None, e
        if block is None:
            break
        if not small and len(block) >= LEAST_BLOCK_BYTES:
            yield block
            continue
        small += block
        if len(small) >= LEAST_BLOCK_BYTES:
            yield bytes(small)
            small.clear()
    if small:
        yield bytes(small)
    if broken is not None:
        raise broken


def _gunzip(blocks: Iterator[bytes]) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits=31)
    step = MEMBER_BYTES
    try:
        for block in blocks:
            at = 0
            while at < len(block):
                if stream.eof:
                    # Tar and tape tools pad with zeros; anything else is one more member.
                    padded = block[at : at + MEMBER_BYTES]
                    at += len(padded) - len(padded.lstrip(b"\0"))
                    if not padded.strip(b"\0"):
                        continue
                    stream = zlib.decompressobj(wbits=31)
                part = block[at : at + step]
                at += len(part)
                while part and not stream.eof:
                    yield stream.decompress(part, BLOCK_BYTES)
                    part = stream.unconsumed_tail
                # What zlib has not used it copies: a block of many small members would be copied once for each.
                at -= len(stream.unused_data)
                step = MEMBER_BYTES if stream.eof else min(2 * step, BLOCK_BYTES)
        while not stream.eof:
            out = stream.decompress(b"", BLOCK_BYTES)
            if not out:
                raise Broken("is a truncated gzip file")
            yield out
    except zlib.error as e:
        raise Broken(f"is a damaged gzip file ({e})") from None


def records(blocks: Iterator[bytes], separator: bytes, limit_bytes: int) -> Iterator[tuple[int, int, bytes | None]]:
    """The number of each record (from 1), where it begins, and the record; None in its place when it is longer than the
    limit. Blocks of nothing but blank records are counted and passed over."""
    number, begin = 1, 0
    pending: list[bytes] = []  # the record that is not over yet
    size = 0
    blank = True  # so is all that is pending
    tail = b""  # what a separator that spans two blocks may begin with
    overlap = len(separator) - 1
    for block in blocks:
        pending.append(block)
        size += len(block)
        blank = blank and block.isspace()
        # Only what is new is searched, so that a long record costs one pass and not one for each block.
        recent = tail + block if tail else block
        if separator not in recent:
            tail = recent[-overlap:] if overlap else b""
            if size - len(tail) > limit_bytes:
                pending = [tail]
            continue
        if blank and not overlap and size <= limit_bytes:
            rest = block[block.rindex(separator) + 1 :]
            number += block.count(separator)
            begin += size - len(rest)
        else:
            kept = b"".join(pending)
            pending = []
            dropped = size - len(kept)  # of a record that is too long
            *whole, rest = kept.split(separator)
            del kept
            for record in whole:
                yield number, begin, None if dropped or len(record) > limit_bytes else record
                number += 1
                begin += dropped + len(record) + len(separator)
                dropped = 0
            blank = not rest or rest.isspace()
        pending, size = [rest], len(rest)
        tail = rest[-overlap:] if overlap else b""
    if size:
        yield number, begin, None if size > limit_bytes else b"".join(pending)


def document_cut(window: bytes) -> int:
    """Where to cut a text that goes on after this window: after the last line, else word, else character in it."""
    tail = window[-CUT_SEARCH_BYTES:]
    before = len(window) - len(tail)
    for mark in (b"\n", b" "):
        at = tail.rfind(mark)
        if at >= 0:
            return before + at + 1
    cut = len(window)
    while cut > 1 and len(window) - cut < 4 and window[cut - 1] & 0xC0 == 0x80:  # inside a character
        cut -= 1
    return cut - 1 if cut > 1 else len(window)  # before the character that may be unfinished


def parts_of_a_document(blocks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """A stream that is one document, cut where it is longer than a document may be; with where each part begins."""
    begin = 0
    pending = bytearray()
    for block in blocks:
        pending += block
        while len(pending) > MAX_DOCUMENT_BYTES:
            cut = document_cut(bytes(pending[:MAX_DOCUMENT_BYTES]))
            yield begin, bytes(pending[:cut])
            del pending[:cut]
            begin += cut
    if pending:
        yield begin, bytes(pending)
