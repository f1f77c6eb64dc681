"""Data sets on an object store: s3://bucket/prefix, read in pieces of 256 KiB that a local cache keeps.

Pieces and not whole shards, because the order of the data is one shuffle over all of it: a batch touches as many shards
as it has windows. With pieces the first batch does not wait for gigabytes, and a data set larger than the cache costs
one small request a window, where whole shards would be fetched again for every batch.
Every piece is checked against the shard's `.sums`, and those against the index.

Of a data set that is larger than the cache a fixed share of the pieces is kept, by their names: in a shuffle all pieces
come back equally seldom, so to keep the newest would only mean to write and delete all the time, for as many hits.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from shoal.data.cache import Cache
from shoal.data.folder import Array, Shard, check_ends, first_beyond, no_such_id
from shoal.data.index import INDEX_FILE, PIECE_BYTES, Index, ShardFile, ShardInfo, parse_index, pieces_of
from shoal.data.local_folder import map_file
from shoal.data.shards import DEFAULT_CACHE_BYTES, TokenShards
from shoal.data.store import connect, explained, get
from shoal.errors import DataError
from shoal.objects import past_the_end

PARALLEL_REQUESTS = 16
TRIES = 3
MOST_PASSING = 64 << 20  # bytes of pieces that were fetched ahead and not yet read, in memory
FILLED = 0.8  # of the cache, with the pieces of one data set; the rest is for documents' borders and other data sets
_FIRST_RETRIES, _RETRIES = 2, 10  # a wrong address should be told at once; hours into a run patience pays


class RemoteFolder:
    """A data set on an object store, as `shoal.data.folder.Folder` wants it."""

    def __init__(self, url: str, cache_dir: str | os.PathLike[str] | None = None, cache_bytes: int = 0) -> None:
        self.where = url.rstrip("/")
        self._first = connect(url, _FIRST_RETRIES)
        self._store = connect(url, _RETRIES)
        default = Path.home() / ".cache" / "shoal"
        self.cache = Cache(Path(cache_dir or default), cache_bytes or DEFAULT_CACHE_BYTES)
        self._sums: dict[str, Array] = {}  # checksums of the pieces, by the checksum of their file
        self._trusted: dict[str, Array] = {}  # pieces that this process has checked once, by the same
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._kept = 1.0  # share of the pieces
        self._vocab_size, self._item = 1 << 32, np.dtype("<u4")
        self._passing: OrderedDict[str, memoryview] = OrderedDict()

    def holds(self, index: Index) -> None:
        self._vocab_size, self._item = index.vocab_size, np.dtype(index.dtype).newbyteorder("<")
        self._kept = min(1.0, FILLED * self.cache.limit_bytes / max(1, index.size_bytes))

    def look(self, index: Index) -> None:
        """Nothing to do: a request for each file of a bucket costs more than one that fails later."""

    def read(self, name: str) -> bytes:
        return get(self._first, self.where, name)

    def open(self, shard: ShardInfo) -> Shard:
        self._load_sums(shard)
        tokens, mask = shard.tokens_file, shard.mask_file
        ends = self._document_ends(shard.docs_file)
        check_ends(f"{self.where}/{shard.docs_file.name}", ends, shard.tokens)
        return Shard(
            tokens=Pieces(self, tokens, shard.token_dtype),
            ends=ends,
            mask=None if mask is None else Pieces(self, mask, "u1"),
        )

    def want(self, spans: Callable[[], Sequence[tuple[ShardInfo, int, int]]]) -> None:
        """Fetch what is missing of these spans, many requests at a time."""
        wanted = spans()
        new = {shard.name: shard for shard, _, _ in wanted if shard.tokens_xxh3 not in self._sums}
        self._together([partial(self._fetch_small, shard) for shard in new.values()])
        missing: dict[tuple[str, int], Callable[[], object]] = {}
        for shard, lo, hi in wanted:
            for file, item_bytes in ((shard.tokens_file, shard.tokens_bytes // shard.tokens), (shard.mask_file, 1)):
                if file is None:
                    continue
                for piece in range(lo * item_bytes // PIECE_BYTES, pieces_of(hi * item_bytes)):
                    if (file.xxh3, piece) not in missing and not self._has(_key(file, piece)):
                        missing[file.xxh3, piece] = partial(self._download_piece, file, piece)
        self._together(list(missing.values()))

    def part_of_piece(self, file: ShardFile, piece: int, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of a piece, from the cache or the store."""
        size = min(PIECE_BYTES, file.size_bytes - piece * PIECE_BYTES)
        if (fetched := self._passing.get(_key(file, piece))) is not None:
            return bytes(fetched[lo:hi])
        trusted = self._trusted[file.xxh3]
        if trusted[piece]:
            part = self.cache.read(_key(file, piece), size, lo, hi - lo)
            if part is not None:
                return part
        else:  # the first use in this process: what a crash or a bad disk did to the cache must not reach the model
            whole = self.cache.read(_key(file, piece), size)
            if whole is not None and self._right_piece(file, piece, whole):
                self._refuse_no_ids(file, piece, whole)
                trusted[piece] = True
                return whole[lo:hi]
        return bytes(self._download_piece(file, piece)[lo:hi])

    def _download_piece(self, file: ShardFile, piece: int) -> memoryview:
        start = piece * PIECE_BYTES
        size = min(PIECE_BYTES, file.size_bytes - start)
        data = self._download(file, start, size, lambda d: self._right_piece(file, piece, d))
        self._refuse_no_ids(file, piece, data)
        key = _key(file, piece)
        with self._lock:
            self._passing[key] = data
            while len(self._passing) * PIECE_BYTES > MOST_PASSING:
                self._passing.popitem(last=False)
        if self._keeps(key):
            self.cache.put(key, data)
            self._trusted[file.xxh3][piece] = True
        return data

    def _has(self, key: str) -> bool:
        return key in self._passing or (self._keeps(key) and self.cache.has(key))

    def _keeps(self, key: str) -> bool:
        return self._kept >= 1 or xxhash.xxh3_64_intdigest(key.encode()) < self._kept * 2**64

    def _right_piece(self, file: ShardFile, piece: int, data: bytes | memoryview) -> bool:
        return bool(xxhash.xxh3_64_intdigest(data) == self._sums[file.xxh3][piece])

    def _refuse_no_ids(self, file: ShardFile, piece: int, data: bytes | memoryview) -> None:
        """Tokens that the vocabulary has not; each piece is looked at when this process first trusts it."""
        if not file.name.endswith(".tokens"):
            return
        ids = np.frombuffer(data, self._item)
        if (at := first_beyond(ids, self._vocab_size)) is not None:
            first = piece * PIECE_BYTES // self._item.itemsize
            raise no_such_id(f"{self.where}/{file.name}", ids, at, first, self._vocab_size)

    def _download(self, file: ShardFile, start: int, size: int, right: Callable[[memoryview], bool]) -> memoryview:
        """Bytes of an object, tried again when they are too few or not those that were uploaded."""
        import obstore

        got = 0
        for attempt in range(TRIES):
            time.sleep(0.2 * attempt)
            try:
                data = memoryview(obstore.get_range(self._store, file.name, start=start, length=size)).cast("B")
            except Exception as e:
                if not past_the_end(e):
                    raise explained(e, self.where, file.name) from None
                data = memoryview(b"")
            got = len(data)
            if got == size and right(data):
                return data
        what = f"ends after {start + got:,} of {file.size_bytes:,} bytes" if got < size else "has a wrong checksum"
        raise DataError(
            f"{self.where}/{file.name} {what} in {TRIES} downloads (bytes {start:,} to {start + size:,}); "
            "upload the data set again."
        )

    def _fetch_small(self, shard: ShardInfo) -> None:
        self._load_sums(shard)
        if not self.cache.has(_key(shard.docs_file)):
            self._download_whole(shard.docs_file)

    def _load_sums(self, shard: ShardInfo) -> None:
        if shard.tokens_xxh3 in self._sums:
            return
        sums = np.frombuffer(self._whole(shard.sums_file), "<u8")
        count = pieces_of(shard.tokens_bytes)
        with self._lock:
            if shard.mask_file is not None:
                self._keep_sums(shard.mask_file, sums[count:])
            self._keep_sums(shard.tokens_file, sums[:count])

    def _keep_sums(self, file: ShardFile, sums: Array) -> None:
        self._trusted.setdefault(file.xxh3, np.zeros(len(sums), bool))
        self._sums[file.xxh3] = sums

    def _document_ends(self, file: ShardFile) -> Array:
        """Mapped, not loaded: a process has many shards open. A map outlives the deletion of its file."""
        try:
            ends = map_file(self.cache.path(_key(file)), file, "<i8")
            if xxhash.xxh3_128_hexdigest(ends.data) == file.xxh3:
                self.cache.touch(_key(file))
                return ends
        except (FileNotFoundError, DataError):
            pass  # not there, or cut short: fetched below
        return np.frombuffer(self._download_whole(file), "<i8")

    def _whole(self, file: ShardFile) -> bytes | memoryview:
        data = self.cache.read(_key(file), file.size_bytes)
        if data is not None and xxhash.xxh3_128_hexdigest(data) == file.xxh3:
            return data
        return self._download_whole(file)

    def _download_whole(self, file: ShardFile) -> memoryview:
        data = self._download(file, 0, file.size_bytes, lambda d: bool(xxhash.xxh3_128_hexdigest(d) == file.xxh3))
        self.cache.put(_key(file), data)
        return data

    def _together(self, jobs: Sequence[Callable[[], object]]) -> None:
        if len(jobs) <= 1:
            for job in jobs:
                job()
            return
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(PARALLEL_REQUESTS, "shoal-fetch")
        for done in [self._pool.submit(job) for job in jobs]:
            done.result()


class Pieces:
    """One file of a remote shard that reads like an array."""

    def __init__(self, folder: RemoteFolder, file: ShardFile, dtype: str) -> None:
        self._folder, self._file, self._dtype = folder, file, np.dtype(dtype)

    def __len__(self) -> int:
        return self._file.size_bytes // self._dtype.itemsize

    def __getitem__(self, part: slice, /) -> Array:
        lo, hi, step = part.indices(len(self))
        if step != 1:
            raise ValueError("a remote array is read in one direction, without gaps")
        begin, end = lo * self._dtype.itemsize, max(lo, hi) * self._dtype.itemsize
        out = bytearray()
        for piece in range(begin // PIECE_BYTES, pieces_of(end)):
            at = piece * PIECE_BYTES
            out += self._folder.part_of_piece(self._file, piece, max(begin - at, 0), min(end - at, PIECE_BYTES))
        return np.frombuffer(out, self._dtype)


def upload(local_dir: str | os.PathLike[str], url: str, on_bytes: Callable[[int], None] | None = None) -> None:
    """Copy a prepared data set to an object store. Its index goes last, so readers see all of it or nothing."""
    import obstore

    data = TokenShards.open(local_dir)
    store = connect(url, _RETRIES, create=True)
    try:
        there = parse_index(get(connect(url, _FIRST_RETRIES, create=True), url, INDEX_FILE), url)
    except DataError:
        pass  # nothing there, as hoped
    else:
        if there.fingerprint == data.fingerprint:
            return
        raise DataError(f"{url} already holds another data set; choose another prefix or delete that one first.")
    names = [file.name for shard in data.index.shards for file in shard.files]
    if (Path(local_dir) / data.tokenizer).is_file():
        names.append(data.tokenizer)
    for name in [*names, INDEX_FILE]:
        path = Path(local_dir) / name
        try:
            obstore.put(store, name, path)
        except Exception as e:
            raise explained(e, url, name) from None
        if on_bytes:
            on_bytes(path.stat().st_size)


def _key(file: ShardFile, piece: int | None = None) -> str:
    """By content, not by place: the same shard under two addresses is kept once."""
    return file.xxh3 if piece is None else f"{file.xxh3}-{piece:06d}"
