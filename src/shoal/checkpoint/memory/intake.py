"""A keeper takes in the copy of another node's rank: in bounded memory, and compared with its checksums to the end.

The sender says what it has and what it is of the whole, is told to go on once there is room, and sends the file. The
bytes arrive in the file that will be served; it is named, and counts, when all of them are right. The file of the
oldest copy is used again for the next: new pages would cost as much time as the bytes take to arrive.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from shoal import wire
from shoal.checkpoint.manifest import Corrupt
from shoal.checkpoint.memory.generations import COPIES, EXTRA, drop_copies, kept_in, put, read_extra, retire, room_bytes
from shoal.checkpoint.names import Name, part_file, rank_file
from shoal.checkpoint.part import decode_part

MOST_TABLE_BYTES = 1 << 28  # of a part, and of `extra`
_ARRIVING, _SPARE = ".in-", ".spare-"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_AT_ONCE_BYTES = 64 << 20  # Python's other threads wait meanwhile


class Unfit(Exception):
    """A copy that is not taken in; the sentence is for the sender."""


class Intake:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies = folder / COPIES
        self._copies.mkdir(exist_ok=True)
        for leftover in (*self._copies.glob(f"{_ARRIVING}*"), *self._copies.glob(f"{_SPARE}*")):
            leftover.unlink(missing_ok=True)
        self._lock = threading.Lock()  # around what several copies must not do at once: find room, and be named
        self._arriving: set[int] = set()

    def take(
        self, sock: socket.socket, name: Name, rank: int, world: int, size: int, part_bytes: int, extra_bytes: int
    ) -> None:
        if max(part_bytes, extra_bytes) > MOST_TABLE_BYTES:
            raise wire.Broken("a table that is too long")
        part, extra = wire.receive(sock, part_bytes), wire.receive(sock, extra_bytes)
        expected = _stretches(part, extra, rank, world, size)
        with self._one_of(rank), self._space(rank, size) as (path, pages):
            wire.send(sock, {})
            damaged, data = False, memoryview(pages)
            for at, count, digest in expected:
                _populate(pages, at, count)
                wire.receive_into(sock, data[at : at + count])
                # The rest is still received, so that the sender hears the reason instead of a closed connection.
                damaged = damaged or xxh3_128_hexdigest(data[at : at + count]) != digest
            if damaged:
                raise Unfit("what arrived is not what its checksums say: it was overwritten or damaged on its way")
            self._name(path, name, rank, part, extra)
        wire.send(sock, {})

    @contextmanager
    def _one_of(self, rank: int) -> Iterator[None]:
        with self._lock:
            if rank in self._arriving:
                raise Unfit(f"a copy of rank {rank} is just arriving")
            self._arriving.add(rank)
        try:
            yield
        finally:
            with self._lock:
                self._arriving.discard(rank)

    @contextmanager
    def _space(self, rank: int, size: int) -> Iterator[tuple[Path, mmap.mmap]]:
        """A file of that size, whose pages are there. Where it is tight the older of two copies gives its own."""
        path, spare = self._copies / f"{_ARRIVING}{secrets.token_hex(8)}", self._spare(rank)
        with self._lock:
            if not self._reuse(spare, path, size) and not self._allocate(path, size):
                drop_copies(self._folder, rank, 1, spare)
                if not self._reuse(spare, path, size) and not self._allocate(path, size):
                    free = room_bytes(self._folder)
                    raise Unfit(f"{self._folder} has no room for {size} bytes of rank {rank} ({free} are free)")
        try:
            with open(path, "r+b", buffering=0) as file:
                yield path, mmap.mmap(file.fileno(), size)
        finally:
            with contextlib.suppress(FileNotFoundError):  # it has got its name
                path.rename(spare)

    def _reuse(self, spare: Path, path: Path, size: int) -> bool:
        try:
            if spare.stat().st_size == size:
                spare.rename(path)
                return True
            spare.unlink()  # of another mesh
        except FileNotFoundError:
            pass
        return False

    def _allocate(self, path: Path, size: int) -> bool:
        if size > room_bytes(self._folder):
            return False
        try:
            with open(path, "xb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return True
        except OSError:
            path.unlink(missing_ok=True)
            return False

    def _spare(self, rank: int) -> Path:
        return self._copies / f"{_SPARE}{rank:05d}"

    def _drop_spares(self) -> None:
        """Those of ranks that are no more: the run goes on with fewer, or on other nodes."""
        ranks = {rank for one in kept_in(self._copies).values() for rank in one.ranks}
        for spare in self._copies.glob(f"{_SPARE}*"):
            if int(spare.name.removeprefix(_SPARE)) not in ranks:
                spare.unlink(missing_ok=True)

    def _name(self, path: Path, name: Name, rank: int, part: bytes, extra: bytes) -> None:
        home = self._copies / str(name)
        try:
            with self._lock:
                home.mkdir(exist_ok=True)
                path.rename(home / rank_file(rank))
                if extra:
                    put(home / EXTRA, extra)
                put(home / part_file(rank), part)
                drop_copies(self._folder, rank, spare=self._spare(rank))
                retire(self._folder, name.term)
                self._drop_spares()
        except OSError as e:
            raise Unfit(f"the copy cannot be kept ({os.strerror(e.errno or errno.EIO)})") from e


def _stretches(table: bytes, extra: bytes, rank: int, world: int, size: int) -> list[tuple[int, int, str]]:
    """(at, bytes, checksum) of the header and of all blocks, which together are the file; else `Unfit`."""
    try:
        part = decode_part(table)
        if extra:
            read_extra(extra)
        written = sum(part.layout.bytes_of(each, rank) for each in part.layout.names_of(rank))
        if (part.rank, part.world, part.file.bytes) != (rank, world, size):
            raise Corrupt("it is not that of the file")
        if part.file.header_bytes + written != size:
            raise Corrupt("its tensors do not fill the file")
        stretches = [(0, part.file.header_bytes, part.file.header_xxh3_128), *part.file.blocks()]
    except (Corrupt, KeyError, TypeError, ValueError, AttributeError) as e:
        raise Unfit(f"the part of rank {rank} cannot be used: {e}") from e
    return stretches


def _populate(pages: mmap.mmap, at: int, count: int) -> None:
    """Maps the pages before the bytes come, many at a time instead of one fault each."""
    begin = at - at % mmap.PAGESIZE
    for start in range(begin, at + count, _AT_ONCE_BYTES):
        with contextlib.suppress(OSError):
            pages.madvise(_POPULATE_WRITE, start, min(_AT_ONCE_BYTES, at + count - start))
