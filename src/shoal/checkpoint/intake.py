"""A keeper takes in the copy of another node's rank: in bounded memory, and compared with its checksums to the end.

The sender says what it has and what it is of the whole, is told to go on once there is room, and sends the file. The
bytes arrive in the file that will be served; it is named, and counts, when all of them are right.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from shoal.checkpoint import wire
from shoal.checkpoint.generations import COPIES, EXTRA, drop_copies, put, retire, room_bytes, unseal
from shoal.checkpoint.manifest import Corrupt
from shoal.checkpoint.names import Name, part_file, rank_file
from shoal.checkpoint.part import Part, decode_part

MOST_TABLE_BYTES = 1 << 28  # of a part, and of `extra`
_ARRIVING = ".in-"


class Unfit(Exception):
    """A copy that is not taken in; the sentence is for the sender."""


class Intake:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies = folder / COPIES
        self._copies.mkdir(exist_ok=True)
        for leftover in self._copies.glob(f"{_ARRIVING}*"):
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
        with self._one_of(rank), self._space(rank, size) as (path, data):
            wire.send(sock, {})
            damaged = False
            for at, count, digest in expected:
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
    def _space(self, rank: int, size: int) -> Iterator[tuple[Path, memoryview]]:
        """A file of that size, whose pages are there. The older copies of the rank go first where it is tight."""
        path = self._copies / f"{_ARRIVING}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with self._lock:
                self._allocate(fd, rank, size)
            yield path, memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)  # unless it has got its name

    def _allocate(self, fd: int, rank: int, size: int) -> None:
        for keep in (None, 1):
            if keep is not None:
                drop_copies(self._folder, rank, keep)
            if size <= room_bytes(self._folder):
                with contextlib.suppress(OSError):
                    os.posix_fallocate(fd, 0, size)
                    return
                os.ftruncate(fd, 0)
        free = room_bytes(self._folder)
        raise Unfit(f"{self._folder} has no room for {size} bytes of rank {rank} ({free} are free)")

    def _name(self, path: Path, name: Name, rank: int, part: bytes, extra: bytes) -> None:
        home = self._copies / str(name)
        try:
            with self._lock:
                home.mkdir(exist_ok=True)
                path.rename(home / rank_file(rank))
                if extra:
                    put(home / EXTRA, extra)
                put(home / part_file(rank), part)
                drop_copies(self._folder, rank)
                retire(self._folder, name.term)
        except OSError as e:
            raise Unfit(f"the copy cannot be kept ({os.strerror(e.errno or errno.EIO)})") from e


def _stretches(sealed: bytes, extra: bytes, rank: int, world: int, size: int) -> list[tuple[int, int, str]]:
    """(at, bytes, checksum) of the header and of all slices, which together are the file; else `Unfit`."""
    try:
        part = decode_part(unseal(sealed))
        if extra:
            unseal(extra)
        stretches = [(0, part.file.header_bytes, part.file.header_xxh3_128), *_slices(part)]
        ends = [0]
        for at, count, _ in stretches:
            if at != ends[-1] or count <= 0:
                raise Corrupt("its slices do not follow each other")
            ends.append(at + count)
        if (part.rank, part.world, part.file.bytes, ends[-1]) != (rank, world, size, size):
            raise Corrupt("it is not that of the file")
    except (Corrupt, KeyError, TypeError, ValueError, AttributeError) as e:
        raise Unfit(f"the part of rank {rank} cannot be used: {e}") from e
    return stretches


def _slices(part: Part) -> list[tuple[int, int, str]]:
    return sorted(
        (s.at, math.prod(s.shape) * entry.item_bytes, s.xxh3_128)
        for entry in part.tensors.values()
        for s in entry.slices
    )
