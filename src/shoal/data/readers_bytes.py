"""Bytes in, records out, in bounded memory: ranges of files, gzip and zstandard streams, and what separates records."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

BLOCK_BYTES = 1 << 20
# python-zstandard puts out all that a block of input expands to; a small block keeps that small.
ZSTD_BLOCK_BYTES = 1 << 14
# A record (a line of JSON, a document between separators) has to fit into memory a few times over.
MAX_RECORD_BYTES = 1 << 27
# Plain text without separators is one document a file; a longer one is cut here. No model sees 16 MiB in one window,
# and a file of that size is a corpus rather than a document.
MAX_DOCUMENT_BYTES = 1 << 24
CUT_SEARCH_BYTES = 1 << 20


class Broken(Exception):
    """The bytes end or go wrong half-way; the message says how, to follow the file's name."""


def file_blocks(path: str, start: int, stop: int, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    with open(path, "rb") as f:
        f.seek(start)
        left = stop - start
        while left:
            block = f.read(min(BLOCK_BYTES, left))
            if not block:
                raise Broken("became shorter while it was read")
            left -= len(block)
            on_bytes(len(block))
            yield block


def unpacked(blocks: Iterator[bytes], packing: str) -> Iterator[bytes]:
    if packing == "gz":
        return _gunzip(blocks)
    if packing == "zst":
        return _unzstd(blocks)
    return blocks


def _gunzip(blocks: Iterator[bytes]) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits=31)
    try:
        for block in blocks:
            while block:
                if stream.eof:
                    block = block.lstrip(b"\0")  # tar and tape tools pad with zeros; anything else is one more member
                    if not block:
                        break
                    stream = zlib.decompressobj(wbits=31)
                out = stream.decompress(block, BLOCK_BYTES)
                yield out
                block = stream.unused_data if stream.eof else stream.unconsumed_tail
        while not stream.eof:
            out = stream.decompress(b"", BLOCK_BYTES)
            if not out:
                raise Broken("is a truncated gzip file")
            yield out
    except zlib.error as e:
        raise Broken(f"is a damaged gzip file ({e})") from None


def _unzstd(blocks: Iterator[bytes]) -> Iterator[bytes]:
    # Not stream_reader: at the end of a truncated file that one returns nothing more, as if all were well.
    import zstandard

    # Published corpora are packed with --long=31; without this their frames are refused.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    stream = decompressor.decompressobj()
    whole = False
    try:
        for block in blocks:
            for i in range(0, len(block), ZSTD_BLOCK_BYTES):
                part = block[i : i + ZSTD_BLOCK_BYTES]
                while part:
                    if stream.eof:
                        stream = decompressor.decompressobj()
                    yield stream.decompress(part)
                    part = stream.unused_data if stream.eof else b""
                whole = stream.eof
    except zstandard.ZstdError as e:
        raise Broken(f"is a damaged zstandard file ({e})") from None
    if not whole:
        raise Broken("is a truncated zstandard file")


def records(
    blocks: Iterator[bytes], separator: bytes, limit_bytes: int = MAX_RECORD_BYTES
) -> Iterator[tuple[int, bytes | None]]:
    """Where each record begins, and the record; None in its place when it is longer than the limit."""
    begin = 0
    pending: list[bytes] = []  # the record that is not over yet
    size = 0
    tail = b""  # what a separator that spans two blocks may begin with
    overlap = len(separator) - 1
    for block in blocks:
        pending.append(block)
        size += len(block)
        # Only what is new is searched, so that a long record costs one pass and not one for each block.
        recent = tail + block
        if separator not in recent:
            tail = recent[-overlap:] if overlap else b""
            if size - len(tail) > limit_bytes:
                pending = [tail]
            continue
        kept = b"".join(pending)
        dropped = size - len(kept)  # of a record that is too long
        *whole, rest = kept.split(separator)
        for record in whole:
            yield begin, None if dropped or len(record) > limit_bytes else record
            begin += dropped + len(record) + len(separator)
            dropped = 0
        pending, size = [rest], len(rest)
        tail = rest[-overlap:] if overlap else b""
    if size:
        yield begin, None if size > limit_bytes else b"".join(pending)


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
