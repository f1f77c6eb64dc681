"""A rank's file: a safetensors header, then slices; a checksum of the header, and one a block of the rest.

Written here and not by the safetensors package because the checksums are taken from the bytes on their way out, in a
thread beside the writing, and because a snapshot in memory is laid out as this very file. Any safetensors reader opens
the result.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from xxhash import xxh3_128, xxh3_128_hexdigest

from shoal.checkpoint import direct
from shoal.checkpoint.blocks import Digests, File, file_of
from shoal.checkpoint.grids import Dims
from shoal.checkpoint.names import Name
from shoal.checkpoint.store import Folder, Store

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Item:
    """A slice in a file."""

    key: str
    dtype: str
    shape: Dims
    bytes: int


def header_of(name: Name, items: Sequence[Item]) -> bytes:
    """The step and term make the header of each file unlike any other: a file of another checkpoint is noticed by it.

    They are padded: all headers for the same items are equally long, so that a snapshot can be reused in place.
    """
    about = {"format": "pt", "step": f"{name.step:012d}", "term": f"{name.term:012d}"}
    table: dict[str, object] = {"__metadata__": about}
    begin = 0
    for item in items:
        table[item.key] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [begin, begin + item.bytes]}
        begin += item.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of 8, as the safetensors package does it
    return len(text).to_bytes(8, "little") + text


def write(store: Store, path: str, header: bytes, slices: Iterable[memoryview], block_bytes: int) -> File:
    """Writes a file. Returns what the manifest says about it."""
    digests, taken = Digests(block_bytes), deque[Future[None]]()
    written = len(header)

    with ThreadPoolExecutor(1, "shoal-checksum") as beside:

        def chunks() -> Iterable[memoryview]:
            nonlocal written
            yield memoryview(header)
            for data in slices:
                taken.append(beside.submit(digests.update, data))
                written += data.nbytes
                yield data

        store.write(path, chunks())
    for each in taken:
        each.result()
    return file_of(written, len(header), xxh3_128_hexdigest(header), block_bytes, digests.finish())


def digest_of(store: Store, path: str, at: int, count: int) -> str:
    """xxh3-128 of a byte range."""
    return next(digests_of(store, path, [(at, count)]))


def digests_of(store: Store, path: str, ranges: Sequence[tuple[int, int]]) -> Iterator[str]:
    """xxh3-128 of byte ranges (first, count) in the order of the file, which is read once and in bounded memory."""
    place = min((at for at, _ in ranges), default=0)
    pieces = _stream(store, path, place, max((at + count for at, count in ranges), default=0))
    piece = memoryview(b"")
    for at, count in ranges:
        if at < place:  # not in order
            yield digest_of(store, path, at, count)
            continue
        h = xxh3_128()
        while place < at + count:
            piece = piece or next(pieces)
            n = min(piece.nbytes, (at if place < at else at + count) - place)
            if place >= at:
                h.update(piece[:n])
            place, piece = place + n, piece[n:]
        yield h.hexdigest()


def _stream(store: Store, path: str, at: int, end: int) -> Iterator[memoryview]:
    """The bytes of a file, a piece at a time; from the disk itself, not from what memory still holds of it."""
    if isinstance(store, Folder):
        yield from direct.read(store.path(path), at, end)
        return
    buffer = memoryview(bytearray(min(CHUNK_BYTES, end - at)))
    while at < end:
        piece = buffer[: min(len(buffer), end - at)]
        store.read_into(path, at, piece)
        yield piece
        at += len(piece)
