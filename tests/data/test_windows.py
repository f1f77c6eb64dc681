"""Windows: equal, token by token, to cutting them the slow and obvious way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.windows import Windows
from shoal.errors import DataError
from tests.data.reading import EOS, make_documents, slow_window, write_data_set


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=5),
    length=st.integers(1, 40),
    mask_documents=st.booleans(),
    masked=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
def test_windows_equal_the_slow_obvious_cut(tmp_path_factory, sizes, length, mask_documents, masked, shuffle) -> None:
    """Documents longer and shorter than windows, windows across several shards, windows that end where documents do."""
    rng = np.random.default_rng(shuffle.randrange(2**32))
    total = sum(map(sum, sizes))
    length = min(length, total - 1)
    if length < 1:
        return
    # The end-of-document id also occurs inside documents: borders come from the data set, not from the tokens.
    shards = [[[*rng.choice([1, 2, 3, EOS], n - 1).tolist(), EOS] for n in shard] for shard in sizes]
    masks = [[rng.integers(0, 2, n).tolist() for n in shard] for shard in sizes] if masked else None
    data = write_data_set(tmp_path_factory.mktemp("data"), shards, masks)
    windows = Windows([data], length, mask_documents)
    assert windows.sizes == ((total - 1) // length,)
    rows = list(range(windows.sizes[0]))
    shuffle.shuffle(rows)
    batch = windows.batch(np.zeros(len(rows), np.int64), rows)
    documents = [document for shard in shards for document in shard]
    mask = [m for shard in masks for document in shard for m in document] if masks else None
    for row, window in enumerate(rows):
        expected = slow_window(documents, mask, window, length, mask_documents)
        got = (batch.tokens[row], batch.targets[row], batch.positions[row], batch.documents[row])
        for name, g, e in zip(("tokens", "targets", "positions", "documents"), got, expected, strict=True):
            assert g.tolist() == e, name
    assert batch.target_count == sum(t != -100 for row in batch.targets.tolist() for t in row)


def test_rows_of_a_mixed_batch_come_from_their_own_source(tmp_path: Path) -> None:
    parts = [[make_documents(40, seed) for seed in seeds] for seeds in ((0, 1), (2,), (3, 4, 5))]
    length = 16
    windows = Windows([write_data_set(tmp_path / str(k), part) for k, part in enumerate(parts)], length, True)
    rng = np.random.default_rng(0)
    sources = rng.integers(0, 3, 50)
    picks = np.array([rng.integers(windows.sizes[k]) for k in sources])
    batch = windows.batch(sources, picks)
    for row, (source, window) in enumerate(zip(sources, picks, strict=True)):
        documents = [document for shard in parts[source] for document in shard]
        tokens, targets, *_ = slow_window(documents, None, int(window), length, True)
        assert batch.tokens[row].tolist() == tokens
        assert batch.targets[row].tolist() == targets


def test_arrays_have_the_types_that_the_model_expects(tmp_path: Path) -> None:
    batch = Windows([write_data_set(tmp_path, [make_documents(20)])], 8, True).batch([0, 0], [1, 0])
    assert [a.dtype.name for a in (batch.tokens, batch.targets, batch.positions, batch.documents)] == [
        "int64",
        "int64",
        "int64",
        "int32",
    ]
    assert all(a.shape == (2, 8) and a.flags.c_contiguous for a in (batch.tokens, batch.targets, batch.positions))


def test_a_data_set_smaller_than_one_window_is_refused(tmp_path: Path) -> None:
    data = write_data_set(tmp_path, [[[1, 2, 3, EOS]]])
    assert Windows([data], 3, True).sizes == (1,)
    with pytest.raises(DataError, match=r"has 4 tokens and one window needs 5 .*lower data\.seq_len"):
        Windows([data], 4, True)
