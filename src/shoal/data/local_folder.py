"""Data sets on this machine's disks: files that are mapped, and compared with their checksums on first touch.

The first time that a process reads from a piece of 256 KiB it compares the whole piece with the shard's `.sums`, and
those with the index. That is done where the window is read: in the thread that prepares the next steps, so training
does not wait for it and no step is taken with a window that was not compared. Nothing is remembered from run to run:
a file that is changed in place, with its size and time kept, is found by the next process that reads it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from shoal.data.folder import Array, Shard, check_ends, first_beyond, no_such_id
from shoal.data.index import MOST_INDEX_BYTES, PIECE_BYTES, Index, ShardFile, ShardInfo, pieces_of
from shoal.errors import DataError
from shoal.plain_file import NotPlain, open_plain, read_plain

AT_ONCE, FEW = 16, 256  # questions to a disk; of fewer than these one after the other
_AGAIN = "copy the data set again, or prepare it again with --overwrite"


class LocalFolder:
    """A data set on a disk, as `shoal.data.folder.Folder` wants it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.where = str(path)
        self._touched: dict[str, _Touched] = {}  # by the name of the file
        self._vocab_size: int | None = None

    def read(self, name: str) -> bytes:
        if not self.path.is_dir():
            raise DataError(f"there is no folder {self.where}; make the data set with `shoal data prepare`.")
        try:
            return read_plain(self.path / name, MOST_INDEX_BYTES)
        except FileNotFoundError:
            raise DataError(
                f"{self.where} has no {name}, so it is no complete data set; make or finish it with "
                "`shoal data prepare`."
            ) from None
        except NotPlain as e:
            raise DataError(f"{e}; {_AGAIN}.") from None

    def holds(self, index: Index) -> None:
        self._vocab_size = index.vocab_size

    def look(self, index: Index) -> None:
        """Finds what a broken copy left behind without reading a token. Many questions at a time: on a disk of other
        machines each takes as long as a way through the network."""
        files = [file for shard in index.shards for file in shard.files]
        if len(files) < FEW:
            found = [self._first_wrong(files)]
        else:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(self._first_wrong, [files[i::AT_ONCE] for i in range(AT_ONCE)]))
        if wrong := next(filter(None, found), None):
            raise DataError(wrong)

    def _first_wrong(self, files: Sequence[ShardFile]) -> str | None:
        return next(filter(None, map(self._wrong, files)), None)

    def _wrong(self, file: ShardFile) -> str | None:
        path = self.path / file.name
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            return f"{path} is missing; {_AGAIN}."
        except OSError as e:
            return f"{path} cannot be looked at ({e.strerror}); {_AGAIN}."
        same = size == file.size_bytes
        return None if same else f"{path} has {size:,} bytes and the index says {file.size_bytes:,}; {_AGAIN}."

    def open(self, shard: ShardInfo) -> Shard:
        try:
            return self._open(shard)
        except FileNotFoundError as e:  # after somebody had looked
            raise DataError(f"{e.filename} is missing; {_AGAIN}.") from None

    def _open(self, shard: ShardInfo) -> Shard:
        sums = np.frombuffer(self._whole(shard.sums_file), "<u8")
        count, mask = pieces_of(shard.tokens_bytes), shard.mask_file
        return Shard(
            tokens=self._checked(shard.tokens_file, shard.token_dtype, sums[:count], self._vocab_size),
            ends=self._document_ends(shard),
            mask=None if mask is None else self._checked(mask, "u1", sums[count:]),
        )

    def want(self, spans: Callable[[], Sequence[tuple[ShardInfo, int, int]]]) -> None:
        """Nothing to do: the page cache is as near as it gets."""

    def _checked(self, file: ShardFile, dtype: str, sums: Array, vocab_size: int | None = None) -> Checked:
        path = self.path / file.name
        array = map_file(path, file, dtype)
        return Checked(path, array, sums, self._state(file, len(sums)).pieces, vocab_size)

    def _document_ends(self, shard: ShardInfo) -> Array:
        """Compared whole, once: it has no checksums of pieces, and is a hundredth of the tokens."""
        file = shard.docs_file
        path = self.path / file.name
        ends = map_file(path, file, "<i8")
        touched = self._state(file, 1)
        if not touched.pieces[0]:
            _warm(path, 0, file.size_bytes)
            compare(str(path), file, xxhash.xxh3_128(ends.data))
            check_ends(str(path), ends, shard.tokens)
            touched.pieces[0] = 1
        return ends

    def _whole(self, file: ShardFile) -> bytes:
        path = self.path / file.name
        try:
            data = read_plain(path, file.size_bytes)
        except OSError as e:
            raise DataError(f"{path} cannot be read ({e.strerror}); {_AGAIN}.") from None
        compare(str(path), file, xxhash.xxh3_128(data))
        return data

    def _state(self, file: ShardFile, pieces: int) -> _Touched:
        """What this process has compared of a file; nothing, once another file has taken its place."""
        status = os.stat(self.path / file.name)
        which = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._touched.get(file.name)
        if known is None or known.which != which:
            known = self._touched[file.name] = _Touched(which, bytearray(pieces))
        return known


@dataclass(frozen=True)
class _Touched:
    which: tuple[int, int, int, int]
    pieces: bytearray = field(repr=False)  # 1: compared and right


class Checked:
    """A mapped file that reads like an array, and compares each piece before the first slice of it is handed out. Of
    tokens it also looks that they are ids of the vocabulary: 5 µs a piece, where comparing it takes 46."""

    def __init__(
        self, path: Path, array: Array, sums: Array, touched: bytearray, vocab_size: int | None = None
    ) -> None:
        self._path, self._array, self._sums, self._touched = path, array, sums, touched
        self._vocab_size = vocab_size
        self._item_bytes = array.itemsize

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, part: slice, /) -> Array:
        lo, hi, step = part.indices(len(self._array))
        if step != 1:
            raise ValueError("a shard is read in one direction, without gaps")
        first, end = lo * self._item_bytes // PIECE_BYTES, -(-hi * self._item_bytes // PIECE_BYTES)
        while first < end and (first := self._touched.find(0, first, end)) >= 0:
            self._compare(first)
        return self._array[lo:hi]

    def _compare(self, piece: int) -> None:
        whole = self._array.data.cast("B")
        begin = piece * PIECE_BYTES
        end = min(begin + PIECE_BYTES, len(whole))
        _warm(self._path, begin, end)
        # The mapping is compared, not what the file was read as: it is what the model gets.
        if xxhash.xxh3_64_intdigest(whole[begin:end]) != self._sums[piece]:
            raise DataError(
                f"{self._path} is corrupt: bytes {begin:,} to {end:,} differ from what was prepared (their checksum is "
                f"wrong); {_AGAIN}."
            )
        if self._vocab_size is not None:
            first = begin // self._item_bytes
            ids = self._array[first : end // self._item_bytes]
            if (at := first_beyond(ids, self._vocab_size)) is not None:
                raise no_such_id(str(self._path), ids, at, first, self._vocab_size)
        self._touched[piece] = 1


def compare(where: str, file: ShardFile, got: xxhash.xxh3_128) -> None:
    """The checksum of a whole file."""
    if got.hexdigest() != file.xxh3:
        raise DataError(f"{where} is corrupt: its checksum is {got.hexdigest()}, not {file.xxh3}; {_AGAIN}.")


def map_file(path: Path, file: ShardFile, dtype: str) -> Array:
    """A plain array over a memory map, which lives as long as the array. (np.memmap's slices cost microseconds.)"""
    try:
        fd = open_plain(path)
    except NotPlain as e:
        raise DataError(f"{e}; {_AGAIN}.") from None
    try:
        return np.frombuffer(mmap.mmap(fd, file.size_bytes, access=mmap.ACCESS_READ), dtype)
    except ValueError:  # too short: mmap refuses, where a touch would have been SIGBUS
        raise DataError(f"{path} is shorter than the {file.size_bytes:,} bytes the index says; {_AGAIN}.") from None
    finally:
        os.close(fd)


_UNSEEN = memoryview(bytearray(PIECE_BYTES))  # what is read only to be in the page cache; all threads write into it


def _warm(path: Path, begin: int, end: int) -> None:
    """Reads the bytes into the page cache. To touch a mapping that is not there holds the interpreter until the disk
    has answered, and where the disk cannot answer, or the file was cut, ends the process by SIGBUS; to read does not.
    """
    try:
        fd = open_plain(path)
        try:
            while begin < end:
                if not (got := os.preadv(fd, [_UNSEEN[: end - begin]], begin)):
                    raise DataError(f"{path} ends after {begin:,} bytes, and the index says more; {_AGAIN}.")
                begin += got
        finally:
            os.close(fd)
    except OSError as e:
        raise DataError(f"{path} cannot be read at byte {begin:,} ({e.strerror}); {_AGAIN}.") from None
