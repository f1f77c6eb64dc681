"""Shards: what is written is what is read, and nothing that is broken is read quietly."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import shards as shards_module
from shoal.data.shards import ShardWriter, TokenShards, write_index
from shoal.errors import DataError, SetupError
from tests.data.reading import EOS, make_documents, write_data_set


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    write_data_set(tmp_path / "data", [make_documents(20, seed) for seed in range(3)])
    return tmp_path / "data"


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5),
    cut=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    masked=st.booleans(),
)
def test_any_part_of_the_stream_reads_back_as_written(tmp_path_factory, sizes, cut, masked) -> None:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(len(sizes))
    shards = [[[*rng.integers(0, 256, n - 1).tolist(), EOS] for n in shard] for shard in sizes]
    masks = [[rng.integers(0, 2, n).tolist() for n in shard] for shard in sizes] if masked else None
    data = write_data_set(folder, shards, masks)
    stream = [t for shard in shards for document in shard for t in document]
    ends = set(np.cumsum([n for shard in sizes for n in shard]).tolist())
    start, stop = sorted(c % (len(stream) + 1) for c in cut)
    tokens, ends_read, mask = data.read(start, stop)
    assert tokens.tolist() == stream[start:stop]
    assert ends_read.tolist() == [i - start for i in range(start + 1, stop + 1) if i in ends]
    if masks is not None:
        assert mask is not None
        assert mask.tolist() == [m for shard in masks for document in shard for m in document][start:stop]
    data.verify()


def test_large_ids_need_and_get_uint32(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "shard-00000", "uint32") as writer:
        writer.add([70_000, 128_000, 1])
        shards = [writer.close()]
    index = write_index(tmp_path, shards, vocab_size=128_256, eos_id=1, tokenizer="tokenizer.json")
    assert index.dtype == "uint32"
    data = TokenShards.open(tmp_path)
    assert data.read(0, 3)[0].tolist() == [70_000, 128_000, 1]
    data.verify()


def test_documents_added_together_equal_documents_added_one_by_one(tmp_path: Path) -> None:
    documents = make_documents(50)
    one = ShardWriter(tmp_path, "one", "uint16")
    for document in documents:
        one.add(document)
    together = ShardWriter(tmp_path, "together", "uint16")
    together.add_many(np.concatenate(documents), np.cumsum([len(d) for d in documents]))
    a, b = one.close().to_json(), together.close().to_json()
    assert {**a, "name": ""} == {**b, "name": ""}


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [([], None), ([65_536], None), ([-1], None), ([0.5], None), ([1, 2], [1]), ([1, 2], [1, 2])],
    ids=["empty", "too large", "negative", "not a number", "short mask", "mask of 2"],
)
def test_what_is_no_document_is_not_written(tmp_path: Path, tokens: list[int], mask: list[int] | None) -> None:
    writer = ShardWriter(tmp_path, "shard-00000", "uint16", with_mask=mask is not None)
    with pytest.raises(ValueError, match=r"."):
        writer.add(tokens, mask)
    assert writer.close().tokens_bytes == 0
    assert (tmp_path / "shard-00000.tokens").stat().st_size == 0


def test_a_shard_appears_only_when_it_is_closed_and_an_aborted_one_leaves_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "shard-00000", "uint16")
    writer.add([1, 2, 3])
    assert all(p.name.endswith(".tmp") for p in tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="stop"), writer:
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_equal_content_has_an_equal_fingerprint_and_other_content_another(tmp_path: Path) -> None:
    documents = make_documents(10)
    same = [write_data_set(tmp_path / name, [documents]).fingerprint for name in ("a", "b")]
    moved_border = [documents[0][:-1] + documents[1], *documents[2:]]
    other = write_data_set(tmp_path / "c", [[*moved_border, [EOS]]]).fingerprint
    assert same[0] == same[1] != other


@pytest.mark.parametrize("suffix", ["tokens", "docs", "sums"])
def test_bit_flip_in_a_shard_is_found_by_verify(data_set: Path, suffix: str) -> None:
    path = data_set / f"shard-00001.{suffix}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"shard-00001\.{suffix} is corrupt"):
        TokenShards.open(data_set).verify()


def test_bit_flip_in_a_mask_is_found_by_verify(tmp_path: Path) -> None:
    documents = make_documents(5)
    write_data_set(tmp_path, [documents], [[[1] * len(d) for d in documents]])
    path = tmp_path / "shard-00000.mask"
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"shard-00000\.mask is corrupt"):
        TokenShards.open(tmp_path).verify()


def test_ids_outside_the_vocabulary_are_found_on_first_touch_and_by_verify(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "shard-00000", "uint16")
    writer.add([300, EOS])
    write_index(tmp_path, [writer.close()], vocab_size=257, eos_id=EOS, tokenizer="byte")
    with pytest.raises(DataError, match="outside the vocabulary of 257"):
        TokenShards.open(tmp_path).verify()
    with pytest.raises(DataError, match=r"shard-00000\.tokens has the id 300 at token 0"):
        TokenShards.open(tmp_path).read(1, 2)


def test_a_truncated_or_missing_file_is_refused_when_opened(data_set: Path) -> None:
    path = data_set / "shard-00002.docs"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=rf"shard-00002\.docs has {len(content) - 1} bytes and the index says"):
        TokenShards.open(data_set)
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00002\.docs is missing"):
        TokenShards.open(data_set)


def test_a_file_cut_while_it_is_open_is_an_error_and_no_crash(data_set: Path) -> None:
    data = TokenShards.open(data_set)
    os.truncate(data_set / "shard-00000.tokens", 10)
    with pytest.raises(DataError, match=r"shard-00000\.tokens is shorter than"):
        data.read(0, 50)


def test_a_folder_without_an_index_is_no_data_set(data_set: Path, tmp_path: Path) -> None:
    (data_set / "index.json").unlink()
    with pytest.raises(DataError, match=r"has no index\.json"):
        TokenShards.open(data_set)
    with pytest.raises(DataError, match="there is no folder"):
        TokenShards.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"format": "other"}, DataError, "not the index of a Shoal data set"),
        ({"version": 2}, SetupError, "version 2 of the shard format and this Shoal reads version 1"),
        ({"vocab_size": 70_000}, DataError, "does not fit uint16"),
        ({"eos_id": 257}, DataError, "outside the vocabulary"),
        ({"tokens": 1}, DataError, "totals differ"),
        ({"dtype": "float32"}, DataError, "where one of uint16, uint32 belongs"),
        ({"fingerprint": "0" * 32}, DataError, "fingerprint is not that of its shards"),
        ({"shards": [{"name": "x"}]}, DataError, "shards: tokens: it is missing"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(data_set: Path, changes, error, says: str) -> None:
    edit_index(data_set, **changes)
    with pytest.raises(error, match=says):
        TokenShards.open(data_set)


def test_a_shard_name_cannot_lead_out_of_the_folder(data_set: Path) -> None:
    shards = json.loads((data_set / "index.json").read_text())["shards"]
    shards[0]["name"] = "../../etc/passwd"
    edit_index(data_set, shards=shards)
    with pytest.raises(DataError, match="no name for a shard"):
        TokenShards.open(data_set)


def test_an_index_that_is_cut_off_is_refused(data_set: Path) -> None:
    text = (data_set / "index.json").read_text()
    (data_set / "index.json").write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match="not valid JSON"):
        TokenShards.open(data_set)


def test_an_empty_data_set_is_not_published(tmp_path: Path) -> None:
    empty = ShardWriter(tmp_path, "shard-00000", "uint16").close()
    with pytest.raises(DataError, match="nothing to train on"):
        write_index(tmp_path, [empty], vocab_size=257, eos_id=EOS, tokenizer="byte")
    assert not (tmp_path / "index.json").exists()


def test_more_shards_than_may_be_open_are_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "MAX_OPEN_SHARDS", 2)
    data = write_data_set(tmp_path, [[[i, EOS]] for i in range(8)])
    descriptors = len(os.listdir("/proc/self/fd"))
    assert data.read(0, 16)[0].tolist() == [t for i in range(8) for t in (i, EOS)]
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2 * 2  # tokens and docs of two shards
