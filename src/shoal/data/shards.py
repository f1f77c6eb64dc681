"""Token shards, opened: read at random, as one long stream of tokens that happens to be cut into shards.

The format is in docs/reference/shards.md, its index in `shoal.data.index`, its writer in `shoal.data.writer`. Shards on
an object store are read by `shoal.data.remote`, those on a disk by `shoal.data.local_folder`. Both compare what is read
with the checksums that were taken when it was prepared.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash

from shoal.data.folder import Array, Folder, Shard
from shoal.data.index import INDEX_FILE, Index, ShardInfo, parse_index, write_index
from shoal.data.local_folder import LocalFolder, compare
from shoal.data.writer import ShardWriter
from shoal.errors import DataError

__all__ = ["ShardInfo", "ShardWriter", "TokenShards", "write_index"]

DEFAULT_CACHE_BYTES = 20_000_000_000
# A mapped file costs a file descriptor, and most systems give a process 1,024.
MAX_OPEN_SHARDS = 128
_VERIFY_ITEMS = 1 << 22


def folder_at(
    path_or_url: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> Folder:
    where = os.fspath(path_or_url)
    if "://" in where:
        from shoal.data.remote import RemoteFolder

        return RemoteFolder(where, cache_dir, cache_bytes)
    return LocalFolder(where)


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
        opened = cls.unseen(path_or_url, cache_dir, cache_bytes)
        opened.look()
        return opened

    @classmethod
    def unseen(
        cls,
        path_or_url: str | os.PathLike[str],
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> TokenShards:
        """By its index alone: for who needs sizes and names, or reads after somebody else has looked."""
        folder = folder_at(path_or_url, cache_dir, cache_bytes)
        return cls.of(folder, folder.read(INDEX_FILE))

    @classmethod
    def of(cls, folder: Folder, index: bytes) -> TokenShards:
        """With an index that was read before."""
        found = parse_index(index, folder.where)
        folder.holds(found)
        return cls(folder, found)

    def look(self) -> None:
        """That all files are there and as long as the index says."""
        self.folder.look(self.index)

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
    def start_id(self) -> int | None:
        return self.index.start_id

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

    def want(self, starts: Array, lengths: Array | int) -> None:
        """Pieces of so many tokens from these places are read next. Costs nothing for a local data set."""
        shards = self.index.shards

        def spans() -> list[tuple[ShardInfo, int, int]]:
            both = zip(starts.tolist(), np.broadcast_to(lengths, starts.shape).tolist(), strict=True)
            return [(shards[i], lo, hi) for s, length in both for i, lo, hi in self._spans(s, s + length)]

        self.folder.want(spans)

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Read everything: checksums, ids inside the vocabulary, documents that start and end as they should."""
        for i, info in enumerate(self.index.shards):
            shard = self.shard(i)
            whole = f"{self.where}/{info.name}"
            compare(f"{whole}.sums", info.sums_file, xxhash.xxh3_128(self.folder.read(info.sums_file.name)))
            compare(f"{whole}.docs", info.docs_file, xxhash.xxh3_128(shard.ends.data))
            ends = shard.ends
            begins = ends[:0] if self.start_id is None else np.concatenate([[0], ends[:-1]])
            tokens_hash, mask_hash = xxhash.xxh3_128(), xxhash.xxh3_128()
            right_ids = True
            for lo in range(0, info.tokens, _VERIFY_ITEMS):
                hi = min(lo + _VERIFY_ITEMS, info.tokens)
                ids = shard.tokens[lo:hi]
                last = ids[ends[np.searchsorted(ends, lo, "right") : np.searchsorted(ends, hi, "right")] - 1 - lo]
                first = ids[begins[np.searchsorted(begins, lo) : np.searchsorted(begins, hi)] - lo]
                marked = bool(np.all(last == self.eos_id)) and bool(np.all(first == self.start_id))
                right_ids = right_ids and int(ids.max()) < self.vocab_size and marked
                tokens_hash.update(ids.data)
                if shard.mask is not None:
                    mask_hash.update(shard.mask[lo:hi].data)
                if on_bytes:
                    on_bytes(ids.nbytes)
            # Its pieces were right: this finds an index whose `.sums` are of other tokens than its fingerprint.
            compare(f"{whole}.tokens", info.tokens_file, tokens_hash)
            if info.mask_file is not None:
                compare(f"{whole}.mask", info.mask_file, mask_hash)
            if not right_ids:
                raise DataError(
                    f"{self.where}/{info.tokens_file.name} has an id outside the vocabulary of {self.vocab_size} or a "
                    f"document that does not {self._frame}; prepare it again."
                )

    @property
    def _frame(self) -> str:
        start = "" if self.start_id is None else f"start with {self.start_id} and "
        return f"{start}end with {self.eos_id}"

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where [start, stop) of the stream lies: shards and the tokens [lo, hi) of each."""
        i = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            at, end = int(self.starts[i]), int(self.starts[i + 1])
            yield i, start - at, min(stop, end) - at
            start, i = end, i + 1
