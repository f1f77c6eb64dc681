"""Remote shards and their cache, on a store that is a folder (file://). A real S3 server: tests/clusters."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import obstore
import pytest

from shoal.data import cache as cache_module
from shoal.data import remote as remote_module
from shoal.data.cache import Cache
from shoal.data.feed import Feed
from shoal.data.index import PIECE_BYTES
from shoal.data.order import Order
from shoal.data.remote import RemoteFolder, upload
from shoal.data.shards import TokenShards
from shoal.data.windows import Windows
from shoal.errors import DataError, SetupError, SpecError
from tests.data.reading import EOS, blob, key, use_a_shared_cache, write_data_set
from tests.patience import limit

LENGTH = 128
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of four pieces each, with a mask of two pieces."""
    folder = tmp_path_factory.mktemp("prepared")
    rng = np.random.default_rng(0)
    shards, masks = [], []
    for _ in range(3):
        documents = [[*rng.integers(0, 256, 4999).tolist(), EOS] for _ in range(80)]
        shards.append(documents)
        masks.append([rng.integers(0, 2, 5000).tolist() for _ in documents])
    write_data_set(folder, shards, masks)
    return folder


@pytest.fixture
def bucket(prepared: Path, tmp_path: Path) -> str:
    url = f"file://{tmp_path}/bucket/set"
    upload(prepared, url)
    return url


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SMALLEST_BYTES", 0)


def stored(url: str, name: str) -> Path:
    return Path(url.removeprefix("file://")) / name


def remote_folder(data: TokenShards) -> RemoteFolder:
    assert isinstance(data.folder, RemoteFolder)
    return data.folder


def assert_equal_windows(one: TokenShards, other: TokenShards, picks: np.ndarray) -> None:
    batches = [Windows([data], LENGTH, True).batch(np.zeros(len(picks), int), picks) for data in (one, other)]
    for name in ("tokens", "targets", "positions", "documents"):
        assert np.array_equal(getattr(batches[0], name), getattr(batches[1], name)), name


def test_a_remote_data_set_reads_like_the_local_one(prepared: Path, bucket: str, tmp_path: Path) -> None:
    local, remote = TokenShards.open(prepared), TokenShards.open(bucket, tmp_path / "cache")
    assert remote.fingerprint == local.fingerprint
    assert_equal_windows(remote, local, np.arange((local.tokens - 1) // LENGTH))
    remote.verify()
    rng = np.random.default_rng(1)
    for _ in range(20):
        start, stop = sorted(rng.integers(0, local.tokens, 2).tolist())
        for got, expected in zip(remote.read(start, stop), local.read(start, stop), strict=True):
            assert np.array_equal(got, expected)


def test_a_feed_over_remote_data_equals_one_over_local_folders(prepared: Path, bucket: str, tmp_path: Path) -> None:
    steps = []
    for where in (str(prepared), bucket):
        windows = Windows([TokenShards.open(where, tmp_path / "cache") for _ in range(2)], LENGTH, True)
        with Feed(windows, Order(windows.sizes, [0.7, 0.3], 5), 16, micro_batch=4) as feed:
            steps.append([b.tokens for t in (0, 1, 10**9) for b in feed.step(t)])
    assert all(np.array_equal(a, b) for a, b in zip(*steps, strict=True))


def test_only_the_pieces_that_are_read_are_downloaded(bucket: str, tmp_path: Path) -> None:
    data = TokenShards.open(bucket, tmp_path / "cache")
    data.read(0, 1000)
    first = data.index.shards[0]
    small = first.docs_file.size_bytes + first.sums_file.size_bytes
    assert remote_folder(data).cache.used_bytes() == small + 2 * PIECE_BYTES  # one of tokens, one of the mask


def test_what_was_read_once_is_read_again_without_the_store(prepared: Path, bucket: str, tmp_path: Path) -> None:
    picks = np.arange(0, 6000, 37)
    assert_equal_windows(TokenShards.open(bucket, tmp_path / "cache"), TokenShards.open(prepared), picks)
    for name in os.listdir(stored(bucket, "")):
        if name != "index.json":
            stored(bucket, name).unlink()
    assert_equal_windows(TokenShards.open(bucket, tmp_path / "cache"), TokenShards.open(prepared), picks)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", ["tokens", "mask", "docs", "sums"])
def test_a_bit_flip_in_the_store_is_refused_and_never_cached(bucket: str, tmp_path: Path, suffix: str) -> None:
    flip(stored(bucket, f"shard-00001.{suffix}"), 3)
    data = TokenShards.open(bucket, tmp_path / "cache")
    start = int(data.starts[1])
    with pytest.raises(DataError, match=rf"shard-00001\.{suffix} has a wrong checksum in 3 downloads"):
        data.read(start, start + 100)
    kept = [p for p in (tmp_path / "cache").glob("*/*") if p.is_file()]
    file = next(f for f in data.index.shards[1].files if f.name.endswith(suffix))
    assert not [p for p in kept if p.name.startswith(file.xxh3)]


def test_an_object_that_is_cut_short_is_refused(bucket: str, tmp_path: Path) -> None:
    os.truncate(stored(bucket, "shard-00000.tokens"), PIECE_BYTES + 100)
    data = TokenShards.open(bucket, tmp_path / "cache")
    with pytest.raises(DataError, match=r"shard-00000\.tokens ends after 262,244 of 800,000 bytes"):
        data.read(0, data.index.shards[0].tokens)
    with pytest.raises(DataError, match=r"shard-00000\.tokens ends after"):  # a piece of which nothing is there
        data.read(data.index.shards[0].tokens - 10, data.index.shards[0].tokens)


@pytest.mark.parametrize("damage", [lambda b: bytes([b[0] ^ 1]) + b[1:], lambda b: b[:-5]], ids=["flipped", "short"])
def test_one_bad_download_is_tried_again(
    prepared: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    """A real store, with a line that damages every second answer."""
    real, calls = obstore.get_range, [0]

    def unreliable(*args, **kwargs) -> bytes:
        calls[0] += 1
        data = bytes(real(*args, **kwargs))
        return damage(data) if calls[0] % 2 else data

    monkeypatch.setattr(obstore, "get_range", unreliable)
    got = TokenShards.open(bucket, tmp_path / "cache").read(0, 1000)[0]
    assert np.array_equal(got, TokenShards.open(prepared).read(0, 1000)[0])
    assert calls[0] >= 2


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_what_a_crash_did_to_the_cache_is_repaired(prepared: Path, bucket: str, tmp_path: Path, damage: str) -> None:
    picks = np.arange(0, 9000, 101)
    assert_equal_windows(TokenShards.open(bucket, tmp_path / "cache"), TokenShards.open(prepared), picks)
    for path in (tmp_path / "cache").glob("*/*"):
        if damage == "flipped":
            flip(path, path.stat().st_size // 2)
        else:
            os.truncate(path, path.stat().st_size // 2 if damage == "short" else 0)
    again = TokenShards.open(bucket, tmp_path / "cache")
    assert_equal_windows(again, TokenShards.open(prepared), picks)
    fresh = TokenShards.open(bucket, tmp_path / "cache")
    assert_equal_windows(fresh, TokenShards.open(prepared), picks)


def test_a_data_set_larger_than_the_cache_is_read_right_and_within_the_limit(
    prepared: Path, bucket: str, tmp_path: Path, small_caches: None
) -> None:
    local = TokenShards.open(prepared)
    most = 3 * PIECE_BYTES
    assert local.index.size_bytes > 3 * most
    data = TokenShards.open(bucket, tmp_path / "cache", most)
    cache = remote_folder(data).cache
    rng = np.random.default_rng(2)
    windows = (local.tokens - 1) // LENGTH
    for _ in range(10):
        assert_equal_windows(data, local, rng.integers(0, windows, 16))
        assert 0 < cache.used_bytes() <= most


def test_of_a_data_set_larger_than_the_cache_a_fixed_share_is_kept_and_nothing_is_deleted_again(
    prepared: Path, bucket: str, tmp_path: Path, small_caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TokenShards.open(bucket, tmp_path / "cache", 4 * PIECE_BYTES)
    cache, puts = remote_folder(data).cache, list[str]()
    put = cache.put
    monkeypatch.setattr(cache, "put", lambda key, blob: (puts.append(key), put(key, blob)))
    monkeypatch.setattr(remote_module, "MOST_PASSING", 0)  # as if much had been read in between
    every = np.arange(0, (data.tokens - 1) // LENGTH, 8)  # a hundred windows of each piece
    for _ in range(3):
        Windows([data], LENGTH, True).batch(np.zeros(len(every), int), every)
    pieces = [key for key in puts if "-" in key]  # and not what every shard has, which two threads may fetch at once
    assert pieces
    assert len(set(pieces)) == len(pieces)  # each once: it was still there the next time
    assert all(cache.has(key) for key in pieces)


# The cache alone.


def test_writers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Room is taken for many blobs at a time: with the lock in other hands they are written all the same."""
    cache = Cache(tmp_path, 20_000_000)
    cache.put(key(0), blob(0))
    with open(tmp_path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for i in range(1, 19):
            cache.put(key(i), blob(i))
    assert all(cache.read(key(i), 1000) == blob(i) for i in range(19))


def test_room_that_a_living_process_has_taken_is_left_to_it_and_a_dead_ones_is_not(
    tmp_path: Path, small_caches: None
) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        cache = Cache(tmp_path, 10_000)
        (tmp_path / "lock").write_text(json.dumps({"used": 4000, "room": {str(other.pid): 4000}}))
        for i in range(20):
            cache.put(key(i), blob(i))
            assert cache.used_bytes() <= 6000
        other.kill()
    for i in range(20):
        cache.put(key(i), blob(i))
    assert cache.used_bytes() > 6000


@pytest.mark.parametrize("held", ["", "garbage", "[1]", '{"used": 1}', '{"used": 1, "room": {"x": 1}}', "700  "])
def test_whatever_the_shared_file_says_the_cache_works(tmp_path: Path, small_caches: None, held: str) -> None:
    (tmp_path / "lock").write_text(held)
    cache = Cache(tmp_path, 5000)
    for i in range(8):
        cache.put(key(i), blob(i))
    assert 0 < cache.used_bytes() <= 5000


def test_the_blobs_unused_for_longest_go_first(tmp_path: Path, small_caches: None) -> None:
    cache = Cache(tmp_path, 10_000, touch_after_s=0)
    for i in range(10):
        cache.put(key(i), blob(i))
        os.utime(cache.path(key(i)), (i, i))
    assert cache.read(key(0), 1000) == blob(0)  # a use: now it is the youngest
    cache.put(key(10), blob(10))
    left = [i for i in range(11) if cache.has(key(i))]
    assert left == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert cache.used_bytes() == 9000


def test_a_blob_larger_than_the_cache_is_not_kept(tmp_path: Path, small_caches: None) -> None:
    cache = Cache(tmp_path, 5000)
    cache.put(key(1), blob(1))
    cache.put(key(2), blob(2, 6000))
    assert cache.has(key(1))
    assert not cache.has(key(2))


def test_a_cache_that_somebody_deletes_is_made_again(tmp_path: Path, small_caches: None) -> None:
    cache = Cache(tmp_path / "cache", 5000)
    for i in range(4):
        cache.put(key(i), blob(i))
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "cache").rmdir()
    assert cache.read(key(0), 1000) is None
    cache.put(key(0), blob(0))
    assert cache.read(key(0), 1000, 9, 9) == b"000000000"


def test_processes_share_a_cache_without_breaking_the_limit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    worst: multiprocessing.Queue = context.Queue()
    most = 20_000
    workers = [context.Process(target=use_a_shared_cache, args=(str(tmp_path), most, s, worst)) for s in range(3)]
    for worker in workers:
        worker.start()
    assert max(worst.get(timeout=limit(60)) for _ in workers) <= most
    for worker in workers:
        worker.join(limit(30))
        assert worker.exitcode == 0


FILL = """
import sys
from pathlib import Path
from shoal.data import cache
from tests.data.reading import blob, key
from tests.patience import limit
cache.SMALLEST_BYTES = 0
c = cache.Cache(Path(sys.argv[1]), 3_000_000)
print("ready", flush=True)
for i in range(10**9):
    c.put(key(i % 50), blob(i % 50, 200_000))
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_blobs_and_a_cache_that_works(
    tmp_path: Path, small_caches: None
) -> None:
    for round in range(3):
        writer = subprocess.Popen([sys.executable, "-c", FILL, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.02 + 0.013 * round)  # not awaiting an event: the moment of the kill is meant to be arbitrary
        writer.send_signal(signal.SIGKILL)
        writer.wait(limit(10))
        writer.stdout.close()
        cache = Cache(tmp_path, 3_000_000)
        for i in range(50):
            assert cache.read(key(i), 200_000) in (None, blob(i, 200_000))
    for i in range(50):
        cache.put(key(i), blob(i, 200_000))
    assert cache.used_bytes() <= 3_000_000
    assert not list(tmp_path.glob("*/*.tmp"))


# What can be wrong, in one sentence.


def test_wrong_places_are_named(tmp_path: Path, bucket: str) -> None:
    with pytest.raises(SpecError, match=r"'ftp://x/y' is no place for a data set; give a folder or s3://bucket/prefix"):
        TokenShards.open("ftp://x/y", tmp_path / "cache")
    with pytest.raises(SpecError, match="is no place for a data set"):
        TokenShards.open("s3://", tmp_path / "cache")
    with pytest.raises(SetupError, match="there is no folder for file:///no/such/place"):
        TokenShards.open("file:///no/such/place", tmp_path / "cache")
    stored(bucket, "shard-00000.docs").unlink()
    with pytest.raises(DataError, match=r"shard-00000\.docs is missing; upload the data set again"):
        TokenShards.open(bucket, tmp_path / "cache").read(0, 10)
    stored(bucket, "index.json").unlink()
    with pytest.raises(DataError, match=r"there is no data set at file://.*: it has no index\.json"):
        TokenShards.open(bucket, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"the data cache .*file/cache cannot be used: Not a directory"):
        TokenShards.open(bucket, tmp_path / "file" / "cache")
    with pytest.raises(SpecError, match=r"too small to hold one batch: set data\.cache_gb to 0\.01 or more"):
        TokenShards.open(bucket, tmp_path / "cache", 1_000_000)


def test_a_missing_package_is_named_with_its_extra(bucket: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(SetupError, match=r"needs the package 'obstore'.*extra \[s3\]"):
        TokenShards.open(bucket, tmp_path / "cache")


def test_an_upload_that_fails_half_way_is_no_data_set_and_can_be_repeated(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/bucket/set"
    real, calls = obstore.put, [0]

    def breaks_off(*args, **kwargs) -> object:
        calls[0] += 1
        if calls[0] == 4:
            raise OSError("connection lost")
        return real(*args, **kwargs)

    monkeypatch.setattr(obstore, "put", breaks_off)
    with pytest.raises(Exception, match="connection lost"):
        upload(prepared, url)
    with pytest.raises(DataError, match="there is no data set"):
        TokenShards.open(url, tmp_path / "cache")
    upload(prepared, url)
    TokenShards.open(url, tmp_path / "cache").verify()


def test_an_upload_never_overwrites_another_data_set(prepared: Path, bucket: str, tmp_path: Path) -> None:
    upload(prepared, bucket)  # the same again: nothing to do
    write_data_set(tmp_path / "other", [[[1, EOS]]])
    with pytest.raises(DataError, match="already holds another data set"):
        upload(tmp_path / "other", bucket)
