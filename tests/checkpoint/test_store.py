"""What checkpoints may expect of a store, whichever it is: a folder, or a bucket on a real S3 server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.checkpoint import bucket
from shoal.checkpoint.bucket import Bucket
from shoal.checkpoint.names import MANIFEST
from shoal.checkpoint.store import Folder, Store, store_of

PART = 5 << 20  # the smallest that S3 allows
NAME = "step-00000010-term-1"


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.cluster)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(bucket, "PART_BYTES", PART)
    if request.param == "folder":
        return Folder(tmp_path / "store")
    return Bucket(request.getfixturevalue("s3"))


def in_chunks(data: bytes, size: int = 3 << 20) -> Iterator[memoryview]:
    for at in range(0, len(data), size):
        yield memoryview(data)[at : at + size]


def gather(store: Store, name: str, files: int = 3) -> None:
    """A checkpoint up to, not including, its publication."""
    for i in range(files):
        store.write(f"{store.staging(name)}/rank-{i:05d}.safetensors", in_chunks(b"r%d" % i))
    store.put(f"{store.staging(name)}/{MANIFEST}", b"{}")


@pytest.mark.parametrize("size", [0, 1, 1000, PART - 1, PART, PART + 1, 2 * PART, 13 << 20])
def test_what_is_written_is_read_whole_and_in_pieces(store: Store, size: int) -> None:
    data = random.Random(size).randbytes(size)
    store.write("a/b", in_chunks(data))
    assert store.size("a/b") == size
    assert store.read("a/b") == data
    rng = random.Random(1)
    for _ in range(5):
        at = rng.randrange(size + 1)
        into = bytearray(rng.randrange(size - at + 1))
        store.read_into("a/b", at, memoryview(into))
        assert into == data[at : at + len(into)]


def test_what_is_written_again_is_replaced(store: Store) -> None:
    for data in (b"first, and longer", b"second"):
        store.put("x", data)
        store.write("y", in_chunks(data))
        assert store.read("x") == store.read("y") == data


def test_chunks_may_be_of_any_size(store: Store) -> None:
    large = memoryview(random.Random(0).randbytes(17 << 20))
    chunks = [memoryview(b""), large, memoryview(b"x"), large[:3], memoryview(b"")]
    store.write("x", iter(chunks))
    assert store.read("x") == b"".join(chunks)


def test_what_ends_too_early_and_what_is_missing_are_told_apart(store: Store) -> None:
    store.put("a/short", b"0123456789")
    for at, count in ((0, 11), (5, 100), (10, 1), (1000, 1)):
        with pytest.raises(EOFError):
            store.read_into("a/short", at, memoryview(bytearray(count)))
    for name in ("a/missing", "missing/b", "missing"):
        with pytest.raises(FileNotFoundError):
            store.size(name)
        with pytest.raises(FileNotFoundError):
            store.read(name)
        with pytest.raises(FileNotFoundError):
            store.read_into(name, 0, memoryview(bytearray(4)))


def test_a_listing_has_the_names_directly_in_a_folder(store: Store) -> None:
    assert store.list() == store.list("nowhere") == []
    for name in ("top", "a/one", "a/two", "a/deeper/three", "ab/four"):
        store.put(name, b"x")
    assert sorted(store.list()) == ["a", "ab", "top"]
    assert sorted(store.list("a")) == ["deeper", "one", "two"]
    assert store.list("a/deeper") == ["three"]
    assert store.list("a/one") == []


def test_a_checkpoint_appears_when_it_is_published_and_is_gone_when_removed(store: Store) -> None:
    other = f"{NAME}1"  # a name that begins like the other
    for name in (NAME, other):
        gather(store, name)
        store.publish(name)
    store.sweep()
    assert sorted(store.list()) == [NAME, other]
    assert sorted(store.list(NAME)) == [MANIFEST, *(f"rank-{i:05d}.safetensors" for i in range(3))]
    store.remove(NAME)
    assert store.list() == [other]
    assert store.list(NAME) == []
    assert store.read(f"{other}/rank-00002.safetensors") == b"r2"


def test_one_file_or_nothing_at_all_can_be_removed(store: Store) -> None:
    store.put("ledger/a", b"1")
    store.put("ledger/ab", b"2")
    store.remove("ledger/a")
    store.remove("ledger/a")
    store.remove("nowhere/at/all")
    assert store.list("ledger") == ["ab"]


def test_as_many_readers_as_a_store_likes_read_at_once(store: Store) -> None:
    data = random.Random(0).randbytes(8 << 20)
    store.write("x", in_chunks(data))

    def read(at: int) -> bool:
        into = bytearray(300_001)
        store.read_into("x", at, memoryview(into))
        return into == data[at : at + len(into)]

    places = [random.Random(1).randrange(len(data) - 300_001) for _ in range(100)]
    with ThreadPoolExecutor(store.readers) as pool:
        assert all(pool.map(read, places))


def test_people_name_a_store_by_a_folder_or_an_address(tmp_path: Path) -> None:
    for given in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        there = store_of(given)
        assert isinstance(there, Folder)
        assert there.where == str(tmp_path)
        assert store_of(there) is there
    assert isinstance(store_of("s3://bucket/prefix"), Bucket)
