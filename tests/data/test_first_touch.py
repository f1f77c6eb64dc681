"""Damage to a shard on disk is found when it is first touched: by whichever reader, before a step is made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from shoal.data.feed import Feed
from shoal.data.index import PIECE_BYTES, fingerprint_in
from shoal.data.order import Order
from shoal.data.shards import ShardWriter, TokenShards, write_index
from shoal.data.windows import Windows
from shoal.errors import DataError
from tests.data.reading import EOS

PIECE_TOKENS = PIECE_BYTES // 2
DOCUMENT = 1024


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """Two shards of three pieces, the last one short; with a mask of two pieces."""
    infos = []
    for k in range(2):
        count = 2 * PIECE_TOKENS + 10 * DOCUMENT
        ids = np.random.default_rng(k).integers(0, 256, count).astype(np.uint16)
        ends = np.arange(DOCUMENT, count + 1, DOCUMENT)
        ids[ends - 1] = EOS
        with ShardWriter(tmp_path, f"shard-{k:05d}", "uint16", with_mask=True) as writer:
            writer.add_many(ids, ends, np.ones(count, np.uint8))
            infos.append(writer.close())
    write_index(tmp_path, infos, vocab_size=257, eos_id=EOS, tokenizer="byte")
    return tmp_path


def flip(path: Path, at: int) -> None:
    """One bit, in place: size, times and inode stay."""
    before = path.stat()
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize(
    ("file", "at", "says"),
    [
        ("shard-00000.tokens", PIECE_BYTES + 7, rf"bytes {PIECE_BYTES:,} to {2 * PIECE_BYTES:,}"),
        ("shard-00001.tokens", 2 * PIECE_BYTES + 1, rf"bytes {2 * PIECE_BYTES:,} to {2 * PIECE_BYTES + 20480:,}"),
        ("shard-00000.mask", PIECE_BYTES + 1, rf"bytes {PIECE_BYTES:,} to {PIECE_BYTES + 10240:,}"),
        ("shard-00000.docs", 80, "checksum"),
        ("shard-00001.sums", 8, "checksum"),
    ],
)
def test_a_flipped_bit_with_size_and_time_kept_is_named_with_its_file_and_place(
    data_set: Path, file: str, at: int, says: str
) -> None:
    flip(data_set / file, at)
    data = TokenShards.open(data_set)
    with pytest.raises(DataError, match=rf"{file} is corrupt: .*{says}"):
        data.read(0, data.tokens)


def test_only_the_piece_that_is_read_is_compared_and_only_once(data_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    real = xxhash.xxh3_64_intdigest

    def counted(data: memoryview) -> int:
        compared.append(len(data))
        return int(real(data))

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", counted)
    flip(data_set / "shard-00000.tokens", 2 * PIECE_BYTES + 1)
    data = TokenShards.open(data_set)
    for _ in range(2):
        data.read(10, PIECE_TOKENS - 10)
    assert compared == [PIECE_BYTES, PIECE_BYTES]  # a piece of tokens, a piece of the mask
    data.read(PIECE_TOKENS - 10, PIECE_TOKENS + 10)  # over the border
    assert len(compared) == 3
    with pytest.raises(DataError, match=r"shard-00000\.tokens"):
        data.read(2 * PIECE_TOKENS - 1, 2 * PIECE_TOKENS + 1)


def test_what_one_process_found_right_is_compared_again_by_the_next(data_set: Path) -> None:
    data = TokenShards.open(data_set)
    data.read(0, data.tokens)
    flip(data_set / "shard-00001.tokens", 3)
    with pytest.raises(DataError, match=r"shard-00001\.tokens is corrupt: bytes 0 to"):
        TokenShards.open(data_set).read(0, data.tokens)


def test_a_file_that_is_replaced_while_it_is_not_open_is_compared_again(
    data_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.data.shards.MAX_OPEN_SHARDS", 1)
    data = TokenShards.open(data_set)
    first = data.read(0, 50)[0]
    data.read(data.tokens - 50, data.tokens)  # the other shard: the first is closed
    other = (data_set / "shard-00000.tokens").read_bytes()[::-1]
    (data_set / "new").write_bytes(other)
    os.replace(data_set / "new", data_set / "shard-00000.tokens")
    with pytest.raises(DataError, match=r"shard-00000\.tokens is corrupt"):
        data.read(0, 50)
    assert len(first) == 50


def test_a_feed_raises_before_it_hands_out_the_step_with_the_damaged_window(data_set: Path) -> None:
    flip(data_set / "shard-00000.tokens", PIECE_BYTES + 7)
    windows = Windows([TokenShards.open(data_set)], 512, mask_documents=True)
    order = Order(windows.sizes, [1.0], seed=0)
    damaged = set(range(PIECE_TOKENS // 512 - 1, 2 * PIECE_TOKENS // 512 + 1))  # a window has one token of the next
    first = next(s for s in range(windows.sizes[0]) if damaged & set(order.at(s * 4, 4)[1].tolist()))
    with Feed(windows, order, batch=4) as feed:
        for step in range(first):
            feed.step(step)
        with pytest.raises(DataError, match=r"shard-00000\.tokens is corrupt"):
            feed.step(first)


def test_a_file_that_was_cut_after_it_was_opened_is_an_error_and_no_crash(data_set: Path) -> None:
    data = TokenShards.open(data_set)
    data.read(0, 50)
    os.truncate(data_set / "shard-00000.tokens", PIECE_BYTES)
    with pytest.raises(DataError, match=rf"shard-00000\.tokens ends after {PIECE_BYTES:,} bytes"):
        data.read(PIECE_TOKENS, PIECE_TOKENS + 50)


def reversed_ends(ends: npt.NDArray[np.int64]) -> None:
    ends[:] = ends[::-1].copy()


def negative_end(ends: npt.NDArray[np.int64]) -> None:
    ends[3] = -5


def end_beyond_all(ends: npt.NDArray[np.int64]) -> None:
    ends[3] = 1 << 62


def two_ends_swapped(ends: npt.NDArray[np.int64]) -> None:
    ends[[3, 4]] = ends[[4, 3]]


@pytest.mark.parametrize("damage", [reversed_ends, negative_end, end_beyond_all, two_ends_swapped])
def test_document_ends_that_cut_nothing_are_refused_though_their_checksum_is_right(
    damage: Callable[[npt.NDArray[np.int64]], None], data_set: Path
) -> None:
    docs = data_set / "shard-00000.docs"
    ends = np.fromfile(docs, "<i8")
    damage(ends)
    ends.tofile(docs)
    index = json.loads((data_set / "index.json").read_text())
    index["shards"][0]["docs_xxh3"] = xxhash.xxh3_128_hexdigest(docs.read_bytes())
    rewrite(data_set, index)
    with pytest.raises(DataError, match="does not cut the tokens into documents"):
        TokenShards.open(data_set).read(0, 10)


def test_sums_made_for_other_tokens_change_what_a_run_remembers_and_are_found_by_verify(data_set: Path) -> None:
    """A forged set: the fingerprint of the old content, and checksums of pieces that fit the new."""
    before = TokenShards.open(data_set).index
    tokens = data_set / "shard-00000.tokens"
    flip(tokens, 6)
    sums = np.fromfile(data_set / "shard-00000.sums", "<u8")
    sums[0] = xxhash.xxh3_64_intdigest(tokens.read_bytes()[:PIECE_BYTES])
    sums.tofile(data_set / "shard-00000.sums")
    index = json.loads((data_set / "index.json").read_text())
    index["shards"][0]["sums_xxh3"] = xxhash.xxh3_128_hexdigest(sums.tobytes())
    (data_set / "index.json").write_text(json.dumps(index))
    forged = TokenShards.open(data_set)
    forged.read(0, 50)
    assert forged.fingerprint == before.fingerprint
    assert forged.index.sums != before.sums
    with pytest.raises(DataError, match=r"shard-00000\.tokens is corrupt: its checksum"):
        forged.verify()


def test_the_fingerprint_of_a_folder_is_that_of_a_sound_index_only(data_set: Path) -> None:
    right = TokenShards.open(data_set).fingerprint
    assert fingerprint_in(data_set) == right
    index = json.loads((data_set / "index.json").read_text())
    (data_set / "index.json").write_text(json.dumps(index | {"fingerprint": "0" * 32}))
    assert fingerprint_in(data_set) is None
    (data_set / "index.json").unlink()
    os.mkfifo(data_set / "index.json")
    assert fingerprint_in(data_set) is None
    with pytest.raises(DataError, match="a FIFO"):
        TokenShards.open(data_set)


def rewrite(folder: Path, index: dict[str, object]) -> None:
    from shoal.data.index import ShardInfo, fingerprint_of

    shards = [ShardInfo.from_json(s) for s in index["shards"]]  # type: ignore[attr-defined]  # JSON
    index["fingerprint"] = fingerprint_of(shards, 257, "uint16")
    (folder / "index.json").write_text(json.dumps(index))
