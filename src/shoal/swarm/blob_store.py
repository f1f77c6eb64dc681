"""Files by the hash of what is in them, on this machine's disk: complete ones, and pieces of those on their way.

A blob's name is the SHA-256 of its length and of the hashes of its pieces of 1 MiB. So the list of those hashes proves
itself by the name, and each piece by the list: pieces from strangers are checked one by one, in any order.

    NAME        the file               NAME.list   the hashes of its pieces, 32 bytes each
    NAME.part   pieces that have come  NAME.at     in place of the file: where it lies outside (JSON)
    NAME.folder marks a manifest of files (`blob_folder`)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from shoal.plain_file import read_object
from shoal.values import text

PIECE = 1 << 20
HASH_BYTES = 32
MOST_PIECES = 1 << 15  # 32 GiB; the list is 1 MiB then
_HEAD = b"shoal blob 1\n"
_NAME = re.compile(r"[0-9a-f]{64}\Z")
_LISTS = 64  # lists kept in memory


def is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.match(value) is not None


def pieces_in(size: int) -> int:
    return -(-size // PIECE)


def name_of(size: int, hashes: bytes) -> str:
    """`hashes`: of all pieces, one after the other."""
    return hashlib.sha256(_HEAD + size.to_bytes(8, "big") + hashes).hexdigest()


def is_whole(name: str, size: int, hashes: bytes) -> bool:
    """Whether that is a blob's length and list."""
    return (
        0 <= size <= MOST_PIECES * PIECE
        and len(hashes) == pieces_in(size) * HASH_BYTES
        and name_of(size, hashes) == name
    )


def hashes_of(file: Path) -> tuple[int, bytes]:
    """Of a file that does not change meanwhile: its length and the hashes of its pieces."""
    hashes, size = bytearray(), 0
    with open(file, "rb", buffering=0) as f:
        buffer = memoryview(bytearray(PIECE))
        while n := _fill(f.fileno(), buffer):
            hashes += hashlib.sha256(buffer[:n]).digest()
            size += n
    if len(hashes) > MOST_PIECES * HASH_BYTES:
        raise ValueError(f"{file} is larger than {MOST_PIECES * PIECE >> 30} GiB; split it.")
    return size, bytes(hashes)


def _fill(fd: int, buffer: memoryview) -> int:
    got = 0
    while got < len(buffer) and (n := os.readv(fd, [buffer[got:]])):
        got += n
    return got


class Store:
    """Safe to use from several threads; a piece is written once, by whoever has it first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lists: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, name: str) -> Path | None:
        """Where the whole blob is, if it is here."""
        file = self.folder / name
        if file.exists():
            return file
        return self._outside(name)

    def size(self, name: str) -> int | None:
        """Of a whole one, or of one on its way."""
        for file in (self.path(name), self.folder / f"{name}.part"):
            with contextlib.suppress(FileNotFoundError):
                if file is not None:
                    return file.stat().st_size
        return None

    def hashes(self, name: str) -> bytes | None:
        """The list of its pieces' hashes, also of one that is on its way."""
        with self._lock:
            if (known := self._lists.get(name)) is not None:
                self._lists.move_to_end(name)
                return known
        try:
            known = (self.folder / f"{name}.list").read_bytes()
        except FileNotFoundError:
            return None
        self._remember(name, known)
        return known

    def add_file(self, file: Path, outside: bool = False) -> tuple[str, int]:
        """Its name and length. Linked or copied into the store; `outside`: stays where it is (data sets of many
        gigabytes), and is no longer offered once it has changed."""
        before = file.stat()
        size, hashes = hashes_of(file)
        name = name_of(size, hashes)
        if self.path(name) is None:
            self._publish(f"{name}.list", hashes)
            self._remember(name, hashes)
            if outside:
                at = {"path": str(file.resolve()), "size": size, "mtime_ns": before.st_mtime_ns}
                self._publish(f"{name}.at", json.dumps(at).encode())
            else:
                self._bring(file, name)
        return name, size

    def add_bytes(self, data: bytes) -> tuple[str, int]:
        hashes = b"".join(hashlib.sha256(data[i : i + PIECE]).digest() for i in range(0, len(data), PIECE))
        name = name_of(len(data), hashes)
        if self.path(name) is None:
            self._publish(f"{name}.list", hashes)
            self._publish(name, data)
        return name, len(data)

    def read_piece(self, name: str, piece: int) -> bytes | None:
        """Of a blob that is here, or of one on its way (whoever asks checks it anyway)."""
        file = self.path(name) or self.folder / f"{name}.part"
        try:
            with open(file, "rb", buffering=0) as f:
                return os.pread(f.fileno(), PIECE, piece * PIECE)
        except FileNotFoundError:
            return None

    # A blob on its way

    def begin(self, name: str, size: int, hashes: bytes) -> int:
        """Room for it; returns the pieces that an earlier attempt left, as bits. ValueError if it is not its list."""
        if not is_whole(name, size, hashes):
            raise ValueError("a list of pieces that is not the blob's")
        part = self.folder / f"{name}.part"
        have = self._pieces_of(part, hashes) if part.exists() else 0
        with open(part, "ab") as f:
            f.truncate(size)
        self._publish(f"{name}.list", hashes)
        self._remember(name, hashes)
        return have

    def write_piece(self, name: str, piece: int, data: bytes | memoryview) -> bool:
        """Whether it is the piece; only then is it kept."""
        hashes = self.hashes(name)
        if hashes is None or hashlib.sha256(data).digest() != hashes[piece * HASH_BYTES : (piece + 1) * HASH_BYTES]:
            return False
        with open(self.folder / f"{name}.part", "r+b", buffering=0) as f:
            view, at = memoryview(data), piece * PIECE
            while len(view):
                n = os.pwrite(f.fileno(), view, at)
                view, at = view[n:], at + n
        return True

    def finish(self, name: str) -> Path:
        """All pieces are there."""
        file, part = self.folder / name, self.folder / f"{name}.part"
        os.chmod(part, 0o444)
        part.rename(file)
        return file

    # Room

    def names(self) -> set[str]:
        """Of all that is here or on its way."""
        return {n for entry in self.folder.iterdir() if is_name(n := entry.name.partition(".")[0])}

    def delete(self, name: str) -> int:
        """The bytes that are free now."""
        freed = 0
        for file in (self.folder / f"{name}{end}" for end in ("", ".part", ".list", ".at", ".folder")):
            with contextlib.suppress(FileNotFoundError):
                found = file.stat()
                freed += found.st_blocks * 512 if found.st_nlink == 1 else 0
                file.unlink()
        with self._lock:
            self._lists.pop(name, None)
        return freed

    def mark_folder(self, name: str) -> None:
        self._publish(f"{name}.folder", b"")

    def is_folder(self, name: str) -> bool:
        return (self.folder / f"{name}.folder").exists()

    def _outside(self, name: str) -> Path | None:
        try:
            at = read_object(self.folder / f"{name}.at")
            file = Path(text(at.get("path"), 4096))
            now = file.stat()
        except (OSError, ValueError):  # the latter: BadValue, or a path with a NUL
            return None
        same = now.st_size == at.get("size") and now.st_mtime_ns == at.get("mtime_ns")
        return file if same else None

    def _pieces_of(self, part: Path, hashes: bytes) -> int:
        have = 0
        for i, found in enumerate(_pieces(part)):
            if found == hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]:
                have |= 1 << i
        return have

    def _bring(self, file: Path, name: str) -> None:
        part = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            try:
                os.link(file, part)
            except OSError:  # another disk, or one without links
                shutil.copyfile(file, part)
            part.rename(self.folder / name)
        finally:
            part.unlink(missing_ok=True)

    def _publish(self, called: str, data: bytes) -> None:
        part = self.folder / f".{called}.{os.getpid()}.{threading.get_ident()}"
        try:
            part.write_bytes(data)
            part.rename(self.folder / called)
        finally:
            part.unlink(missing_ok=True)

    def _remember(self, name: str, hashes: bytes) -> None:
        with self._lock:
            self._lists[name] = hashes
            while len(self._lists) > _LISTS:
                self._lists.popitem(last=False)


def _pieces(file: Path) -> Iterator[bytes]:
    """The hash of each piece; holes of a file that is being filled cost no reading of a disk."""
    with open(file, "rb", buffering=0) as f:
        buffer = memoryview(bytearray(PIECE))
        while n := _fill(f.fileno(), buffer):
            yield hashlib.sha256(buffer[:n]).digest()
