"""Token shards, opened: memory-mapped and read at random.

A data set is one long stream of tokens that happens to be cut into shards; readers never see the cuts.
The format is in docs/reference/shards.md, its index in `shoal.data.index`, its writer in `shoal.data.writer`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from shoal.data.index import INDEX_FILE, Index, ShardFile, ShardInfo, parse_index, write_index
from shoal.data.writer import ShardWriter
from shoal.errors import DataError

__all__ = ["LocalFolder", "ShardInfo", "ShardWriter", "TokenShards", "write_index"]

Array: TypeAlias = npt.NDArray[Any]
DEFAULT_CACHE_BYTES = 20_000_000_000
# A mapped file costs a file descriptor and most systems give a process 1,024.
MAX_MAPPED_SHARDS = 128


class Folder(Protocol):
    """Where the files of a data set are: a local folder, or an object store behind a cache (`shoal.data.remote`)."""

    where: str

    def read(self, name: str) -> bytes:
        """A small file, whole: the index, the tokenizer."""
        ...

    def open(self, file: ShardFile) -> int:
        """A descriptor of the file, to be mapped and closed by the caller; its size is that of the index."""
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

    def open(self, file: ShardFile) -> int:
        return os.open(self.path / file.name, os.O_RDONLY)


@dataclass(frozen=True)
class Mapped:
    """One shard in memory, as the page cache has it: nothing is read until it is touched."""

    tokens: Array  # uint16 or uint32 [tokens]
    ends: Array  # int64 [documents]
    mask: Array | None  # uint8 [tokens]


class TokenShards:
    """An open data set: one stream of tokens with document boundaries. Reading is safe from several threads."""

    def __init__(self, folder: Folder, index: Index) -> None:
        self.folder = folder
        self.index = index
        # starts[i] is where shard i begins in the stream; one more entry for the end.
        self.starts: Array = np.concatenate([[0], np.cumsum([s.tokens for s in index.shards])]).astype(np.int64)
        self._mapped: OrderedDict[int, Mapped] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path_or_url: str | os.PathLike[str],
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> TokenShards:
        """A folder, or s3://bucket/prefix whose shards are fetched into `cache_dir` when they are first needed."""
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

    def shard(self, i: int) -> Mapped:
        """Shard i, mapped; the ones used last stay mapped."""
        with self._lock:
            return self._shard(i)

    def _shard(self, i: int) -> Mapped:
        mapped = self._mapped.get(i)
        if mapped is None:
            info = self.index.shards[i]
            mapped = Mapped(
                tokens=self._map(info.tokens_file, f"<u{self.dtype.itemsize}"),
                ends=self._map(info.docs_file, "<i8"),
                mask=None if info.mask_file is None else self._map(info.mask_file, "u1"),
            )
            self._mapped[i] = mapped
            while len(self._mapped) > MAX_MAPPED_SHARDS:
                self._mapped.popitem(last=False)
        else:
            self._mapped.move_to_end(i)
        return mapped

    def read(self, start: int, stop: int) -> tuple[Array, Array, Array | None]:
        """Tokens [start, stop) of the stream, the document ends within it (1 to stop - start), and the mask."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"[{start}, {stop}) is outside the {self.tokens} tokens of {self.where}")
        tokens, ends, masks = [], [], []
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        for i in range(first, len(self.index.shards)):
            at = int(self.starts[i])
            if at >= stop:
                break
            shard = self.shard(i)
            lo, hi = max(start - at, 0), min(stop - at, len(shard.tokens))
            tokens.append(shard.tokens[lo:hi])
            inside = shard.ends[np.searchsorted(shard.ends, lo, "right") : np.searchsorted(shard.ends, hi, "right")]
            ends.append(inside + (at - start))
            if shard.mask is not None:
                masks.append(shard.mask[lo:hi])
        if not tokens:
            empty = np.empty(0, np.uint8)
            return empty.astype(self.dtype), empty.astype(np.int64), empty if self.has_mask else None
        mask = _joined(masks) if self.has_mask else None
        return _joined(tokens), _joined(ends), mask

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Read everything: checksums, ids inside the vocabulary, documents that end where they should."""
        for i, info in enumerate(self.index.shards):
            shard = self.shard(i)
            for file, array in zip(info.files, (shard.tokens, shard.ends, shard.mask), strict=False):
                assert array is not None
                got = xxhash.xxh3_128_hexdigest(array.data.cast("B"))
                if got != file.xxh3:
                    raise DataError(
                        f"{self.where}/{file.name} is corrupt: its checksum is {got} and the index says {file.xxh3}; "
                        "copy or prepare the data set again."
                    )
                if on_bytes:
                    on_bytes(file.size_bytes)
            if shard.ends[-1] != info.tokens or np.any(np.diff(shard.ends) < 1):
                raise DataError(
                    f"{self.where}/{info.docs_file.name} does not cut the tokens into documents; prepare it again."
                )
            if int(shard.tokens.max()) >= self.vocab_size or np.any(shard.tokens[shard.ends - 1] != self.eos_id):
                raise DataError(
                    f"{self.where}/{info.tokens_file.name} has an id outside the vocabulary of {self.vocab_size} or a "
                    f"document that does not end with {self.eos_id}; prepare it again."
                )

    def _map(self, file: ShardFile, dtype: str) -> Array:
        fd = self.folder.open(file)
        try:
            # Plain arrays over the map: np.memmap's slices cost microseconds each. The map keeps its own descriptor.
            return np.frombuffer(mmap.mmap(fd, file.size_bytes, access=mmap.ACCESS_READ), dtype)
        except ValueError:  # shorter than it should be: mmap refuses, where a touch would have been SIGBUS
            raise DataError(
                f"{self.where}/{file.name} is shorter than the {file.size_bytes:,} bytes the index says; "
                "copy or prepare it again."
            ) from None
        finally:
            os.close(fd)


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
