"""Best-fit packing: no pair that fits a window is cut, each is learnt once an epoch, on any mesh, from any step on."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cli.main import main
from shoal.data import packs
from shoal.data.best_fit import best_fit
from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.data.packs import Packs, shares, shares_in_words
from shoal.data.shards import ShardWriter, TokenShards, write_index
from shoal.data.windows import NO_TARGET, PADDING, Batch, Windows
from shoal.errors import DataError
from shoal.spec.before import of_then
from shoal.spec.begun import Difference
from shoal.spec.resolve import load

EOS = 59_999  # only padding: every token of these data sets is another one, and says whose it is


def numbered(
    folder: Path, shards: list[list[int]], seed: int = 0, masked: bool = True
) -> tuple[TokenShards, Documents]:
    """Documents of these lengths, of which each token is its place in the stream; masks are drawn."""
    rng, documents, infos = np.random.default_rng(seed), Documents([], []), []
    folder.mkdir(parents=True, exist_ok=True)
    for i, sizes in enumerate(shards):
        writer = ShardWriter(folder, f"shard-{i:05d}", "uint16", with_mask=masked)
        for n in sizes:
            mask = rng.integers(0, 2, n).astype(np.uint8)
            writer.add(np.arange(n) + sum(documents.sizes), mask if masked else None)
            documents.sizes.append(n)
            documents.masks.append(mask if masked else np.ones(n, np.uint8))
        infos.append(writer.close())
    write_index(folder, infos, vocab_size=60_000, eos_id=EOS, tokenizer="byte")
    return TokenShards.open(folder), documents


class Documents:
    def __init__(self, sizes: list[int], masks: list[np.ndarray]) -> None:
        self.sizes, self.masks = sizes, masks

    def of(self, token: int) -> tuple[int, int]:
        """The document that this token is of, and its place there."""
        ends = np.cumsum(self.sizes)
        number = int(np.searchsorted(ends, token, side="right"))
        return number, token - (int(ends[number]) - self.sizes[number])


def learnt_in(batch: Batch, documents: Documents) -> Counter[tuple[int, int]]:
    """What is learnt, by document and place, after a look at every token of every row: that targets are what follows,
    that no document is cut which fits, and that nothing is seen of other documents."""
    rows, length = batch.tokens.shape
    learnt: Counter[tuple[int, int]] = Counter()
    for row in range(rows):
        number, before = -1, None
        for i in range(length):
            token, target = int(batch.tokens[row, i]), int(batch.targets[row, i])
            if batch.documents[row, i] == PADDING:
                assert token == EOS
                assert target == NO_TARGET
                assert (batch.documents[row, i:] == PADDING).all()
                assert batch.positions[row, i:].tolist() == list(range(length - i))
                break
            document, place = documents.of(token)
            if document != before:  # begins here: as a whole, or as a piece of one that is too long
                number, first = number + 1, place
                assert place == 0 or documents.sizes[document] > length + 1
            before = document
            assert batch.documents[row, i] == number
            assert batch.positions[row, i] == place - first
            ends = place == documents.sizes[document] - 1
            assert target == (token + 1 if not ends and documents.masks[document][place + 1] else NO_TARGET)
            if target != NO_TARGET:
                learnt[documents.of(target)] += 1
            if documents.sizes[document] <= length + 1:  # then all of it is here
                stop = i + documents.sizes[document] - place
                assert stop <= length + 1
                assert set(batch.documents[row, i : min(stop, length)].tolist()) == {number}
    return learnt


def all_that_may_be_learnt(documents: Documents) -> Counter[tuple[int, int]]:
    return Counter((d, int(place)) for d, mask in enumerate(documents.masks) for place in np.flatnonzero(mask) if place)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=1, max_size=4),
    length=st.integers(1, 30),
    block=st.integers(1, 30),
    masked=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_pair_that_fits_is_never_cut_and_all_is_learnt_once(
    tmp_path_factory, sizes, length: int, block: int, masked: bool, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "BLOCK", block)
        data, documents = numbered(tmp_path_factory.mktemp("data"), sizes, seed, masked)
        windows = Windows([data], length, True, "best-fit")
        rows = np.random.default_rng(seed).permutation(windows.sizes[0])
        batch = windows.batch(np.zeros(len(rows), np.int64), rows)
        assert learnt_in(batch, documents) == all_that_may_be_learnt(documents)
        told = shares(data, length)
        assert told["best-fit"]["windows"] == windows.sizes[0]
        assert told["best-fit"]["padding"] == pytest.approx(float(np.mean(batch.documents == PADDING)))
        assert told["best-fit"]["cut"] == sum(n > length + 1 for n in documents.sizes)
        assert told["chop"]["cut"] == chopped(documents.sizes, length)
        assert batch.token_count == batch.tokens.size - np.count_nonzero(batch.documents == PADDING)
        assert batch.lengths.sum() == batch.token_count


def chopped(sizes: list[int], length: int) -> int:
    """Documents that no window of a chopped data set holds whole."""
    windows = [range(w * length, w * length + length + 1) for w in range((sum(sizes) - 1) // length)]
    ends = np.cumsum(sizes).tolist()
    return sum(not any(e - n in w and e - 1 in w for w in windows) for n, e in zip(sizes, ends, strict=True))


@settings(max_examples=80, deadline=None)
@given(room=st.integers(1, 40), data=st.data())
def test_packing_by_length_equals_the_textbook(room: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, room), max_size=60))
    left: list[int] = []
    for n in sorted(lengths, reverse=True):
        fits = [(free, i) for i, free in enumerate(left) if free >= n]
        if fits:
            left[min(fits)[1]] -= n
        else:
            left.append(room - n)
    bins = best_fit(np.array(lengths, np.int64), room)
    full = np.bincount(bins, weights=lengths).astype(int) if lengths else np.empty(0, int)
    assert sorted((room - full).tolist()) == sorted(left)
    assert list(dict.fromkeys(bins.tolist())) == list(range(len(full)))  # numbered by the first item in them


def test_packs_are_a_promise() -> None:
    """A run that a later Shoal goes on with reads what this one would have read."""
    sizes = np.random.default_rng(0).integers(2, 900, 5_000)
    starts, lengths, cuts = packs.pack(np.cumsum(sizes), 0, 256)
    assert packs.BLOCK == 65_536
    bits = b"".join(part.astype("<i8").tobytes() for part in (starts, lengths, cuts))
    assert xxhash.xxh3_64_hexdigest(bits) == "c529f63c8cbd02c9"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Windows, Documents]:
    rng = np.random.default_rng(1)
    sizes = [rng.integers(2, 40, 30).tolist() for _ in range(3)]
    data, documents = numbered(tmp_path_factory.mktemp("pairs"), sizes)
    return Windows([data], 24, True, "pairs"), documents


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_each_pair_is_learnt_once_an_epoch_on_every_mesh(pairs: tuple[Windows, Documents], world: int) -> None:
    windows, documents = pairs
    order, n, learnt = Order(windows.sizes, [1.0], 5), windows.sizes[0], Counter[tuple[int, int]]()
    feeds = [Feed(windows, order, 12, rank, world, micro_batch=2) for rank in range(world)]
    rows: list[Batch] = []
    for t in range(-(-2 * n // 12)):
        rows += [batch for feed in feeds for batch in feed.assemble(t)]
    for feed in feeds:
        feed.close()
    whole = Batch(**{name: np.concatenate([getattr(b, name) for b in rows])[: 2 * n] for name in Batch.__annotations__})
    learnt = learnt_in(whole, documents)
    assert learnt == Counter(dict.fromkeys(all_that_may_be_learnt(documents), 2))
    # And the order does not know of the mesh.
    assert whole.tokens.tolist() == windows.batch(*order.at(0, 2 * n)).tokens.tolist()


def test_to_seek_equals_to_replay(pairs: tuple[Windows, Documents]) -> None:
    windows, _ = pairs
    order = Order(windows.sizes, [1.0], 9)
    with Feed(windows, order, 4) as feed:
        replayed = [feed.step(t)[0].tokens.tolist() for t in range(12)]
    for t in (11, 3, 7):
        with Feed(Windows(windows.sources, 24, True, "pairs"), order, 4) as feed:
            assert feed.step(t)[0].tokens.tolist() == replayed[t]


def test_text_is_chopped_as_ever_beside_packed_pairs(tmp_path: Path) -> None:
    text, _ = numbered(tmp_path / "text", [[7, 30, 11, 200]], masked=False)
    pairs, documents = numbered(tmp_path / "pairs", [[9, 14, 3, 20, 8]])
    both, alone = Windows([text, pairs], 24, True, "pairs"), Windows([text], 24, True)
    assert both.sizes == (alone.sizes[0], 3)
    batch = both.batch([0, 1, 0, 1, 1], [3, 0, 1, 2, 1])
    expected = alone.batch([0, 0], [3, 1])
    for name in Batch.__annotations__:
        assert getattr(batch, name)[[0, 2]].tolist() == getattr(expected, name).tolist(), name
    rows = Batch(**{name: getattr(batch, name)[[1, 3, 4]] for name in Batch.__annotations__})
    assert learnt_in(rows, documents) == all_that_may_be_learnt(documents)
    assert Windows([pairs], 24, True, "chop").sizes == ((54 - 1) // 24,)
    assert Windows([text], 24, True, "best-fit").packs != (None,)


def test_padding_is_apart_also_where_documents_see_each_other(tmp_path: Path) -> None:
    data, _ = numbered(tmp_path, [[9, 14, 3]])
    batch = Windows([data], 32, False, "pairs").batch([0], [0])
    assert batch.documents[0].tolist() == [0] * 26 + [PADDING] * 6
    assert batch.positions[0].tolist() == [*range(26), *range(6)]
    assert batch.lengths.tolist() == [26]


def test_a_data_set_smaller_than_a_window_is_one_window_of_pairs(tmp_path: Path) -> None:
    data, _ = numbered(tmp_path, [[5, 6]])
    assert Windows([data], 1000, True, "pairs").sizes == (1,)


def test_more_documents_than_a_list_of_them_may_have_are_refused(tmp_path: Path, monkeypatch) -> None:
    data, _ = numbered(tmp_path, [[5, 6, 7]])
    monkeypatch.setattr(packs, "MOST_DOCUMENTS", 2)
    with pytest.raises(DataError, match=r"has 3 documents.*at most 2 in memory; set data\.packing to chop"):
        Packs(data, 8)


def test_blocks_are_cut_by_count_whatever_the_shards(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packs, "BLOCK", 4)
    one, _ = numbered(tmp_path / "one", [[3, 9, 2, 7, 5, 8, 4, 6, 3, 9]])
    many, _ = numbered(tmp_path / "many", [[3], [9, 2], [7, 5, 8, 4, 6, 3], [9]])
    tables = [[part.tolist() for block in Packs(data, 8).blocks() for part in block] for data in (one, many)]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 3 * 3
    assert all(0 == cuts[0] < cuts[-1] for cuts in itertools.islice(tables[0], 2, None, 3))


def test_both_ways_are_told_by_info_and_by_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, _ = numbered(tmp_path / "data", [[9, 14, 3, 20, 8, 30]])
    (tmp_path / "run.yaml").write_text(
        "{name: pairs, model: {preset: tiny}, data: {train: data, seq_len: 24}, train: {steps: 1}}"
    )
    found = shares(data, 24)
    assert found["best-fit"]["cut"] == 1 < found["chop"]["cut"]
    assert main(["data", "info", str(tmp_path / "data"), "--seq-len", "24", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["seq_len"], told["packing"]) == (24, found)
    assert main(["data", "info", str(tmp_path / "data")]) == 0  # of pairs it is told without being asked for
    assert "in windows of 512 tokens, best-fit: windows 1, padding 83.6%, documents cut 0 (0.0%); chop: windows 0" in (
        capsys.readouterr().out
    )
    assert main(["data", "info", str(tmp_path / "data"), "--seq-len", "0"]) == 2
    for packing, used in (("pairs", "best-fit"), ("chop", "chop")):
        assert main(["show", str(tmp_path / "run.yaml"), f"data.packing={packing}"]) == 0
        text = capsys.readouterr().out
        assert f"packing of {tmp_path / 'data'} ({used} here): {shares_in_words(found)}" in text
        assert main(["show", str(tmp_path / "run.yaml"), f"data.packing={packing}", "--json"]) == 0
        (shown,) = json.loads(capsys.readouterr().out)["packing"].values()
        assert shown == {"used": used, **found}


def test_another_packing_would_be_another_run() -> None:
    assert not Difference("data.packing", "chop", "pairs").safe


@pytest.mark.parametrize("left_out", [None, "skip"])
def test_only_a_file_that_states_all_the_rest_is_from_before(tmp_path: Path, left_out: str | None) -> None:
    """A person's file that is silent about packing gets the default, not what old runs had."""
    data = {
        "train": "d",
        "eval": [],
        "seq_len": 8,
        "skip": [],
        "mask_documents": True,
        "cache_dir": None,
        "cache_gb": 1,
    }
    data.pop(left_out or "", None)
    assert (of_then({"data": data}) == {"data": {"packing": "chop"}}) == (left_out is None)
    assert of_then({"data": {**data, "packing": "pairs"}}) == {}
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "a", "data": data, "train": {"steps": 1}}))
    assert load(tmp_path / "run.yaml").run.data.packing == ("chop" if left_out is None else "pairs")


def test_packed_windows_are_the_same_from_an_object_store(tmp_path: Path) -> None:
    local, _ = numbered(tmp_path / "data", [[9, 14, 3], [20, 8, 30]])
    remote = TokenShards.open(f"file://{tmp_path}/data", tmp_path / "cache")
    here, there = Windows([local], 24, True, "pairs"), Windows([remote], 24, True, "pairs")
    assert here.sizes == there.sizes
    rows = np.arange(here.sizes[0])
    one, other = here.batch(np.zeros_like(rows), rows), there.batch(np.zeros_like(rows), rows)
    for name in Batch.__annotations__:
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
