"""The index beside a journal (`journal.index`): its steps as columns, and where its other records are.

Whoever reads a journal needs no index to find the truth, only to find it soon. It is written by readers, and by the
supervisor while a run goes on: a block for every MiB of journal, appended under a lock, each with its digests. One
that is missing, torn, of another version, or of another journal (by size, time and the bytes at the ends) is made anew;
where it cannot be written, a nameless file in the temporary folder takes its place. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from shoal import values
from shoal.errors import SetupError
from shoal.journal.columns import OTHERS, Array, Block, Builder, missing
from shoal.journal.journal import LONG_BYTES, lines, opened
from shoal.journal.record import Odd
from shoal.plain_file import open_plain

BLOCK_BYTES = LONG_BYTES  # of a journal
MAGIC = b"shoal journal index 2\n"
_FRAME = struct.Struct("<4sIQ")  # name, bytes of the header, its digest
_BLOCK = b"BLK:"
_MOST_HEADER_BYTES = 64 << 20
_END_BYTES = 4096  # of the journal, that tell it from another


def index_file(journal: Path) -> Path:
    return journal.with_suffix(".index")


def blocks_of(journal: Path, block_bytes: int = BLOCK_BYTES) -> list[Block]:
    """The whole journal, up to its last whole line. What is new since the index was written is read, and added to it
    where that is at least a block."""
    with opened(journal) as f:
        known = Known.of(f)
        file = _File.found(index_file(journal))
        blocks = file.blocks(f, known) if file else []
        if known.size - _end(blocks) >= block_bytes:
            file, blocks = _persistent(journal, f, known) or _nameless(journal, f, known)
        else:
            file = None
        blocks += _new(file, f, journal, known, _end(blocks), block_bytes)
        return blocks


def extend(journal: Path, block_bytes: int = BLOCK_BYTES) -> int:
    """Adds to the index what is new, for later readers. The offset up to which that is done."""
    with opened(journal) as f:
        known = Known.of(f)
        found = _persistent(journal, f, known)
        if found is None:  # another time
            return known.size
        file, blocks = found
        done = _end(blocks)
        for block in _new(file, f, journal, known, done, block_bytes):
            done = block.end if block.end - block.begin >= block_bytes else done
        return done


def _end(blocks: list[Block]) -> int:
    return blocks[-1].end if blocks else 0


def _new(file: _File | None, f: BinaryIO, journal: Path, known: Known, begin: int, block_bytes: int) -> Iterator[Block]:
    """What comes after `begin`, block by block; the whole ones are appended to the index."""
    builder = Builder(begin)
    for record, at, end in lines(f, journal, begin):
        builder.add(record, at, end)
        if builder.end - builder.begin >= block_bytes:
            yield _kept(file, builder.block(), f, known)
            builder = Builder(builder.end)
    if builder.end > builder.begin:
        yield builder.block()


def _kept(file: _File | None, block: Block, f: BinaryIO, known: Known) -> Block:
    return block if file is None else file.append(block, f, known)


class Known:
    """What tells a journal from another, and from itself before somebody changed it."""

    def __init__(self, size: int, mtime_ns: int, file: _File) -> None:
        self.size, self.mtime_ns = size, mtime_ns
        self.file = file  # stays open for as long as its blocks are used: one that is damaged is read again from there

    @classmethod
    def of(cls, f: BinaryIO) -> Known:
        found = os.fstat(f.fileno())
        return cls(found.st_size, found.st_mtime_ns, _File(os.dup(f.fileno())))

    def fields(self, f: BinaryIO, end: int) -> dict[str, Any]:
        return {"size": self.size, "mtime_ns": self.mtime_ns, "head": _digest(f, 0, end), "tail": _tail(f, end)}

    def is_of(self, told: dict[str, Any], f: BinaryIO, end: int) -> bool:
        if self.size < end or (self.size == told["size"] and self.mtime_ns != told["mtime_ns"]):
            return False
        return bool(told["head"] == _digest(f, 0, end) and told["tail"] == _tail(f, end))


class _File:
    """An index that is open: to read, or with `end` to append to."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.end: int | None = None

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)

    @classmethod
    def found(cls, path: Path) -> _File | None:
        try:
            return cls(open_plain(path))
        except OSError:
            return None

    def blocks(self, f: BinaryIO, known: Known) -> list[Block]:
        """Those of that journal; none where it is another's, or something is wrong."""
        blocks: list[Block] = []
        self.end = len(MAGIC)
        header: dict[str, Any] | None = None
        try:
            if os.pread(self.fd, len(MAGIC), 0) != MAGIC:
                return []
            size = os.fstat(self.fd).st_size
            while (found := self._header(self.end, size)) is not None:
                header, at = found
                block = self._block(header, at, known.file)
                if block.begin != (blocks[-1].end if blocks else 0) or block.end <= block.begin:
                    return []
                blocks.append(block)
                self.end = at + _whole(header, "payload")
            if header is not None and not known.is_of(header["journal"], f, blocks[-1].end):
                return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        return blocks

    def append(self, block: Block, f: BinaryIO, known: Known) -> Block:
        """The block as it is on the disk; as it was given, where that takes no more."""
        if self.end is None:
            return block
        arrays = {name: np.ascontiguousarray(block.load(name)) for name in block.arrays()}
        header: dict[str, Any] = {
            "begin": block.begin,
            "end": block.end,
            "rows": block.rows,
            "others": block.others,
            "columns": block.columns,
            "kinds": block.kinds,
            "islands": block.islands,
            "odd": [block.odd.count, block.odd.first_byte],
            "digests": {name: xxhash.xxh3_64_hexdigest(array.data) for name, array in arrays.items()},
            "payload": sum(array.nbytes for array in arrays.values()),
            "journal": known.fields(f, block.end),
        }
        text = json.dumps(header).encode()
        data = b"".join((_framed(text), text, *(array.tobytes() for array in arrays.values())))
        try:
            if os.pwrite(self.fd, data, self.end) < len(data):
                raise OSError("the disk is full")
            self.end += len(data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.end)
            self.end = None
            return block
        return self._block(header, self.end - header["payload"], known.file)

    def _header(self, at: int, size: int) -> tuple[dict[str, Any], int] | None:
        """A block's, and where its payload begins; None where no whole block follows."""
        frame = os.pread(self.fd, _FRAME.size, at)
        if len(frame) < _FRAME.size:
            return None
        name, length, _ = _FRAME.unpack(frame)
        at += _FRAME.size
        if name != _BLOCK or length > min(_MOST_HEADER_BYTES, size - at):
            return None
        text = os.pread(self.fd, length, at)
        if _framed(text) != frame:
            return None
        header = values.read_object(text, most_parts=values.MOST_ITEMS, most_bytes=_MOST_HEADER_BYTES)
        return (header, at + length) if 0 <= _whole(header, "payload") <= size - at - length else None

    def _block(self, header: dict[str, Any], at: int, journal: _File) -> Block:
        rows, others, end = _whole(header, "rows"), _whole(header, "others"), at + _whole(header, "payload")
        begin_at, end_at = _whole(header, "begin"), _whole(header, "end")
        kinds = values.field(header, "kinds", values.each(values.short))
        islands = values.field(header, "islands", values.each(values.each(values.whole)))
        odd = values.field(header, "odd", values.each(values.whole, 2))
        places: dict[str, tuple[int, str, int, str]] = {}
        for name, digest in values.field(header, "digests", values.by_name(values.short)).items():
            is_other = name.startswith("other.")
            kind, count = (OTHERS[name[6:]], others) if is_other else (missing(name)[0], rows)
            places[name] = (at, kind, count, digest)
            at += 8 * count
        if at != end or rows < 0 or others < 0:
            raise ValueError("a block that does not add up")
        anew: list[Block] = []

        def load(name: str) -> Array:
            begin, kind, count, digest = places[name]
            if not anew:
                data = os.pread(self.fd, 8 * count, begin)
                if xxhash.xxh3_64_hexdigest(data) == digest:
                    return np.frombuffer(data, dtype=kind)
                anew.append(_read_again(journal.fd, begin_at, end_at))  # bits flip here, too
            if (anew[0].rows, anew[0].others) != (rows, others):
                raise SetupError("the journal was changed after its index was written: delete its `journal.index`.")
            return anew[0].load(name) if name in anew[0].arrays() else np.full(count, missing(name)[1], kind)

        return Block(
            begin_at,
            end_at,
            rows,
            others,
            [name for name in values.field(header, "columns", values.each(values.short)) if name in places],
            kinds,
            islands,
            Odd(*odd),
            load,
        )


def _whole(header: dict[str, Any], name: str) -> int:
    return values.field(header, name, values.whole)


def _read_again(journal_fd: int, begin: int, end: int) -> Block:
    builder = Builder(begin)
    with open(os.dup(journal_fd), "rb") as f:
        for record, at, after in lines(f, Path("journal.jsonl"), begin):
            if after > end:
                break
            builder.add(record, at, after)
    return builder.block()


def _persistent(journal: Path, f: BinaryIO, known: Known) -> tuple[_File, list[Block]] | None:
    """The index, to append to, and what is in it; None where it cannot be written, or another one is at it."""
    path = index_file(journal)
    try:
        file = _locked(path)
        blocks = file.blocks(f, known)
        if not blocks and os.fstat(file.fd).st_size:  # others may be reading what is in it: they keep the old file
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            os.close(os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644))
            os.replace(fresh, path)
            file = _locked(path)
            blocks = file.blocks(f, known)
        if not blocks:
            file.end = os.pwrite(file.fd, MAGIC, 0)
        os.ftruncate(file.fd, file.end or 0)  # what a crash has torn
        return file, blocks
    except OSError:  # somebody else's run, a full disk, or a lock
        return None


def _nameless(journal: Path, f: BinaryIO, known: Known) -> tuple[_File | None, list[Block]]:
    """For this reader alone: what is known, and a file without a name, so that the columns need not stay in memory."""
    found = _File.found(index_file(journal))
    blocks = found.blocks(f, known) if found else []
    try:
        with tempfile.TemporaryFile() as held:
            file = _File(os.dup(held.fileno()))
        file.end = 0
        return file, blocks
    except OSError:
        return None, blocks


def _locked(path: Path) -> _File:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = _File(os.open(path, flags, 0o644))
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        raise OSError(f"{path} is no plain file")
    fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _framed(header: bytes) -> bytes:
    return _FRAME.pack(_BLOCK, len(header), xxhash.xxh3_64_intdigest(header))


def _tail(f: BinaryIO, end: int) -> str:
    return _digest(f, max(0, end - _END_BYTES), end)


def _digest(f: BinaryIO, begin: int, end: int) -> str:
    return xxhash.xxh3_64_hexdigest(os.pread(f.fileno(), min(_END_BYTES, end - begin), begin))
