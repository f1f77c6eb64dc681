"""Bytes to disk and back: the safetensors files of a checkpoint, written once in order, each slice with its checksum.

Written here and not by the safetensors package because we want one slice in memory at a time, the checksum taken from
the bytes on their way out, and an fsync before anybody is told. Any safetensors reader opens the result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_hexdigest

from shoal.checkpoint.manifest import Corrupt, Dims, File

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Item:
    """A slice to be written. `read` gives its bytes when their turn comes, so that only one is held at a time."""

    key: str
    dtype: str
    shape: Dims
    bytes: int
    read: Callable[[], memoryview]


def write(path: Path, metadata: dict[str, str], items: Sequence[Item]) -> tuple[File, list[tuple[int, str]]]:
    """Writes and fsyncs the file. Returns what the manifest says about it, and (first byte, checksum) for each item."""
    header = _header(metadata, items)
    placed: list[tuple[int, str]] = []
    at = len(header)
    with open(path, "xb", buffering=0) as f:
        _write_all(f.fileno(), memoryview(header))
        for item in items:
            data = item.read()
            if data.nbytes != item.bytes:
                raise ValueError(f"'{item.key}' gave {data.nbytes} bytes where {item.bytes} were announced")
            digest = xxh3_128_hexdigest(data)
            _write_all(f.fileno(), data)
            placed.append((at, digest))
            at += item.bytes
        os.fsync(f.fileno())
    return File(at, len(header), xxh3_128_hexdigest(header)), placed


def write_small(path: Path, data: bytes) -> None:
    """A small file, whole and on disk when this returns."""
    with open(path, "xb", buffering=0) as f:
        _write_all(f.fileno(), memoryview(data))
        os.fsync(f.fileno())


def read_into(fd: int, at: int, into: memoryview) -> None:
    """Fills `into` from byte `at` on; a file that ends too early is `Corrupt`."""
    done = 0
    while done < into.nbytes:
        n = os.preadv(fd, [into[done:]], at + done)
        if not n:
            raise Corrupt("the file is too short")
        done += n


def digest_of(fd: int, at: int, count: int) -> str:
    """xxh3-128 of a byte range, in bounded memory."""
    h = xxh3_128()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, count)))
    while count:
        part = buffer[: min(len(buffer), count)]
        read_into(fd, at, part)
        h.update(part)
        at, count = at + len(part), count - len(part)
    return h.hexdigest()


def sync_folder(path: Path) -> None:
    """Makes names that were created or renamed in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _header(metadata: dict[str, str], items: Sequence[Item]) -> bytes:
    table: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for item in items:
        table[item.key] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [begin, begin + item.bytes]}
        begin += item.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of 8, as the safetensors package does it
    return len(text).to_bytes(8, "little") + text


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        done += os.write(fd, data[done : done + (1 << 30)])  # Linux writes at most 2 GiB at once
