"""Token shards, opened: read at random, as one long stream of tokens that happens to be cut into shards.

The format is in docs/reference/shards.md, its index in `shoal.data.index`, its writer in `shoal.data.writer`; shards on
an object store are read by `shoal.data.remote`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from shoal.data.index import INDEX_FILE, Index, ShardFile, ShardInfo, parse_index, write_index
from shoal.data.writer import ShardWriter
from shoal.errors import DataError

__all__ = ["ShardInfo", "ShardWriter", "TokenShards", "write_index"]

Array: TypeAlias = npt.NDArray[Any]
DEFAULT_CACHE_BYTES = 20_000_000_000
# A mapped file costs a file descriptor, and most systems give a process 1,024.
MAX_OPEN_SHARDS = 128
_VERIFY_ITEMS = 1 << 22


class Sliced(Protocol):
    """An array that is read by slices: a memory map, or pieces of an object."""

    def __getitem__(self, part: slice, /) -> Array: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Shard:
    """One open shard. Nothing is read until it is touched."""

    tokens: Sliced  # uint16 or uint32 [tokens]
    ends: Array  # int64 [documents]
    mask: Sliced | None  # uint8 [tokens]


class Folder(Protocol):
    """Where the files of a data set are: a local folder, or an object store (`shoal.data.remote`)."""

    where: str

    def read(self, name: str) -> bytes:
        """A small file, whole: the index, the tokenizer."""
        ...

    def open(self, shard: ShardInfo) -> Shard: ...

    def want(self, spans: Callable[[], Sequence[tuple[ShardInfo, int, int]]]) -> None:
        """These tokens [lo, hi) of shards are read next: a chance to fetch them all at once."""
        ...


class LocalFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.where = str(path)

    def read(self, name: str) -> bytes:
        if not self.path.is_dir():
            raise DataError(f"there is no folder {self.where}; make the data set with `shoal data prepare`.")
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise DataError(
                f"{self.where} has no {name}, so it is no complete data set; make or finish it with "
                "`shoal data prepare`."
            ) from None

    def check_sizes(self, index: Index) -> None:
        """Finds what a broken copy left behind without reading a token."""
        for file in (file for shard in index.shards for file in shard.files):
            path = self.path / file.name
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise DataError(f"{path} is missing; copy or prepare the data set again.") from None
            if size != file.size_bytes:
                raise DataError(
                    f"{path} has {size:,} bytes and the index says {file.size_bytes:,}; copy or prepare it again."
                )

    def open(self, shard: ShardInfo) -> Shard:
        mask = shard.mask_file
        return Shard(
            tokens=map_file(self.path / shard.tokens_file.name, shard.tokens_file, shard.token_dtype),
            ends=map_file(self.path / shard.docs_file.name, shard.docs_file, "<i8"),
            mask=None if mask is None else map_file(self.path / mask.name, mask, "u1"),
        )

    def want(self, spans: Callable[[], Sequence[tuple[ShardInfo, int, int]]]) -> None:
        """Nothing to do: the page cache is as near as it gets."""


def map_file(path: Path, file: ShardFile, dtype: str) -> Array:
    """A plain array over a memory map, which lives as long as the array. (np.memmap's slices cost microseconds.)"""
    with open(path, "rb") as f:
        try:
            return np.frombuffer(mmap.mmap(f.fileno(), file.size_bytes, access=mmap.ACCESS_READ), dtype)
        except ValueError:  # too short: mmap refuses, where a touch would have been SIGBUS
            raise DataError(
                f"{path} is shorter than the {file.size_bytes:,} bytes the index says; copy or prepare it again."
            ) from None


class TokenShards:
    """An open data set: one stream of tokens with document boundaries. Reading is safe from several threads."""

    def __init__(self, folder: Folder, index: Index) -> None:
        self.folder = folder
        self.index = index
        # starts[i] is where shard i begins in the stream; one more entry for the end.
        self.starts: Array = np.concatenate([[0], np.cumsum([s.tokens for s in index.shards])]).astype(np.int64)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path_or_url: str | os.PathLike[str],
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> TokenShards:
        """A folder, or s3://bucket/prefix, of which `cache_dir` keeps what was read, up to `cache_bytes`."""
        where = os.fspath(path_or_url)
        if "://" in where:
            from shoal.data.remote import RemoteFolder

            remote = RemoteFolder(where, cache_dir, cache_bytes)
            return cls(remote, parse_index(remote.read(INDEX_FILE), where))
        local = LocalFolder(where)
        index = parse_index(local.read(INDEX_FILE), where)
        local.check_sizes(index)
        return cls(local, index)

    @property
    def where(self) -> str:
        return self.folder.where

    @property
    def tokens(self) -> int:
        return self.index.tokens

    @property
    def documents(self) -> int:
        return self.index.documents

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def eos_id(self) -> int:
        return self.index.eos_id

    @property
    def tokenizer(self) -> str:
        return self.index.tokenizer

    @property
    def fingerprint(self) -> str:
        return self.index.fingerprint

    @property
    def has_mask(self) -> bool:
        return self.index.has_mask

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.index.dtype)

    def shard(self, i: int) -> Shard:
        """Shard i, open; the ones used last stay open."""
        with self._lock:
            shard = self._open.get(i)
            if shard is None:
                shard = self._open[i] = self.folder.open(self.index.shards[i])
                if len(self._open) > MAX_OPEN_SHARDS:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(i)
            return shard

    def read(self, start: int, stop: int) -> tuple[Array, Array, Array | None]:
        """Tokens [start, stop) of the stream, the document ends within it (1 to stop - start), and the mask."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"[{start}, {stop}) is outside the {self.tokens} tokens of {self.where}")
        tokens, ends, masks = [np.empty(0, self.dtype)], [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
        for i, lo, hi in self._spans(start, stop):
            shard = self.shard(i)
            tokens.append(shard.tokens[lo:hi])
            inside = shard.ends[np.searchsorted(shard.ends, lo, "right") : np.searchsorted(shard.ends, hi, "right")]
            ends.append(inside + (int(self.starts[i]) - start))
            if shard.mask is not None:
                masks.append(shard.mask[lo:hi])
        return np.concatenate(tokens), np.concatenate(ends), np.concatenate(masks) if self.has_mask else None

    def want(self, starts: Array, length: int) -> None:
        """Pieces of `length` tokens from these places are read next. Costs nothing for a local data set."""
        shards = self.index.shards
        self.folder.want(
            lambda: [(shards[i], lo, hi) for s in starts.tolist() for i, lo, hi in self._spans(s, s + length)]
        )

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Read everything: checksums, ids inside the vocabulary, documents that end where they should."""
        for i, info in enumerate(self.index.shards):
            shard = self.shard(i)
            self._compare(info.sums_file, xxhash.xxh3_128(self.folder.read(info.sums_file.name)))
            self._compare(info.docs_file, xxhash.xxh3_128(shard.ends.data))
            ends = shard.ends
            if ends[-1] != info.tokens or np.any(np.diff(ends, prepend=0) < 1):
                raise DataError(f"{self.where}/{info.docs_file.name} does not cut the tokens into documents.")
            tokens_hash, mask_hash = xxhash.xxh3_128(), xxhash.xxh3_128()
            right_ids = True
            for lo in range(0, info.tokens, _VERIFY_ITEMS):
                hi = min(lo + _VERIFY_ITEMS, info.tokens)
                ids = shard.tokens[lo:hi]
                last = ids[ends[np.searchsorted(ends, lo, "right") : np.searchsorted(ends, hi, "right")] - 1 - lo]
                right_ids = right_ids and int(ids.max()) < self.vocab_size and bool(np.all(last == self.eos_id))
                tokens_hash.update(ids.data)
                if shard.mask is not None:
                    mask_hash.update(shard.mask[lo:hi].data)
                if on_bytes:
                    on_bytes(ids.nbytes)
            self._compare(info.tokens_file, tokens_hash)
            if info.mask_file is not None:
                self._compare(info.mask_file, mask_hash)
            if not right_ids:
                raise DataError(
                    f"{self.where}/{info.tokens_file.name} has an id outside the vocabulary of {self.vocab_size} or a "
                    f"document that does not end with {self.eos_id}; prepare it again."
                )

    def _compare(self, file: ShardFile, got: xxhash.xxh3_128) -> None:
        if got.hexdigest() != file.xxh3:
            raise DataError(
                f"{self.where}/{file.name} is corrupt: its checksum is {got.hexdigest()}, not {file.xxh3}; "
                "copy or prepare the data set again."
            )

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where [start, stop) of the stream lies: shards and the tokens [lo, hi) of each."""
        i = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            at, end = int(self.starts[i]), int(self.starts[i + 1])
            yield i, start - at, min(stop, end) - at
            start, i = end, i + 1
