"""What a source of the user's own gives is checked window by window: one sentence names what is wrong, and where."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.data.own_windows import OwnWindows
from shoal.data.windows import NO_TARGET, PADDING
from shoal.errors import DataError
from shoal.spec.run import Run
from tests.own.sources import own_run
from tests.train.tiny import make_run

SEQ = 8
RUN = make_run(
    Path("x"),
    **{
        "data.train": [],
        "data.seq_len": SEQ,
        "model.vocab_size": 96,
        "own.data": "mine:Source",
        "model.max_seq_len": 64,
    },
)
IDS = np.arange(SEQ + 1)
WHOLE = {"tokens": IDS[:-1], "targets": IDS[1:]}


class Source:
    """`window` is what every number gives; window 0 is right, so that the others are not asked for at the start."""

    fingerprint = "ids"

    def __init__(self, window: Any = IDS, **about: Any) -> None:
        self.window = window
        vars(self).update(about)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> Any:
        return self.window if i else IDS


def windows(source: Any) -> OwnWindows:
    return OwnWindows(lambda run: source, RUN)


@pytest.mark.parametrize(
    "ids",
    [IDS, IDS.astype(np.uint16), IDS.tolist(), torch.from_numpy(IDS), dict(WHOLE)],
    ids=lambda v: type(v).__name__,
)
def test_ids_of_any_kind_become_a_batch(ids: Any) -> None:
    found = windows(Source(ids))
    assert found.sizes == (30,)
    batch = found.batch([0, 0], [7, 0])
    assert (batch.tokens == IDS[:-1]).all()
    assert (batch.targets == IDS[1:]).all()
    assert (batch.positions == np.arange(SEQ)).all()
    assert not batch.documents.any()
    assert batch.lengths.tolist() == [SEQ, SEQ]
    assert batch.target_count == 2 * SEQ


def test_documents_are_counted_and_padding_comes_last() -> None:
    targets = np.array([1, NO_TARGET, 3, 4, NO_TARGET, 6, NO_TARGET, NO_TARGET])
    given = WHOLE | {"targets": targets, "documents": [3, 3, 7, 7, 7, 8, -1, -1]}
    batch = windows(Source(given)).batch([0], [1])
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1, 2, PADDING, PADDING]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1]]
    assert batch.lengths.tolist() == [2, 3, 1]
    assert batch.token_count == 6
    assert batch.target_count == 4


def test_positions_may_go_on_from_an_earlier_window() -> None:
    batch = windows(Source(WHOLE | {"positions": np.arange(40, 48)})).batch([0], [1])
    assert batch.positions.tolist() == [list(range(40, 48))]
    assert batch.lengths.tolist() == [SEQ]


def test_what_the_source_keeps_is_not_changed() -> None:
    given = WHOLE | {"targets": np.full(SEQ, NO_TARGET), "documents": np.array([0] * 7 + [-1])}
    windows(Source(given)).batch([0], [1]).targets[:] = 5
    assert given["documents"][-1] == -1
    assert (given["targets"] == NO_TARGET).all()


@pytest.mark.parametrize(
    ("window", "said"),
    [
        (IDS[:-1], "window 17 has 8 numbers in its ids, where 9 are needed (data.seq_len and the one after it)."),
        (IDS[None], "window 17 has its ids of shape [1, 9] and type int64, where one row of whole numbers"),
        (IDS / 2, "type float64, where one row of whole numbers"),
        (IDS > 2, "type bool, where"),
        ([[1], [2, 3]], "window 17 has its ids as list, where an array of whole numbers is needed"),
        (None, "of shape [] and type object"),
        (IDS + 90, "window 17 has 96 at place 6 of its ids, where 0 to 95 may stand"),
        (IDS - 1, "window 17 has -1 at place 0 of its ids"),
        ({"tokens": IDS[:-1]}, "window 17 has no `targets`: give tokens and targets, or the ids alone"),
        (WHOLE | {"target": IDS}, "window 17 has `target`, and a window has tokens, targets, documents, positions"),
        (WHOLE | {"targets": IDS}, "has 9 numbers in `targets`, where 8 are needed (data.seq_len)"),
        (WHOLE | {"targets": IDS[1:] - 99}, "has -98 at place 0 of `targets`, where 0 to 95, or -100 may stand"),
        (WHOLE | {"documents": IDS[:-1][::-1]}, "has documents that do not rise: number them in their order"),
        (WHOLE | {"documents": [0] * 7 + [-1]}, "has targets in its padding: set them to -100"),
        (WHOLE | {"positions": IDS[:-1] + 60}, "has 64 at place 4 of `positions`, where 0 to 63 may stand"),
    ],
)
def test_a_wrong_window_is_refused_by_its_number(window: Any, said: str) -> None:
    found = windows(Source(window))
    with pytest.raises(DataError) as e:
        found.batch([0], [17])
    assert str(e.value).startswith("own.data mine:Source: window 17 ")
    assert said in str(e.value)


def _fails(run: Run) -> Any:
    raise OSError("no such disk")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_fails, "own.data mine:Source could not be made: OSError: no such disk."),
        (lambda run: object(), "has no __len__, which says how many windows it has"),
        (lambda run: {1, 2}, "has no __getitem__, which says what is in one"),
        (lambda run: [], "has 0 windows (its __len__)"),
        (lambda run: [IDS], "has no `fingerprint`: set it to a text"),
        (lambda run: Source(fingerprint=3), "has no `fingerprint`"),
        (lambda run: Source(fingerprint=""), "has no `fingerprint`"),
        (lambda run: Source(vocab_size=97), "says vocab_size 97, where a whole number up to model.vocab_size 96"),
        (lambda run: Source(vocab_size=5), "window 0 has 5 at place 5 of its ids"),
    ],
)
def test_a_source_that_is_none_is_refused_when_it_is_made(make: Callable[[Run], Any], said: str) -> None:
    with pytest.raises(DataError) as e:
        OwnWindows(make, RUN)
    assert said in str(e.value)


def test_what_data_it_is_depends_on_its_fingerprint_and_its_length() -> None:
    class Longer(Source):
        def __len__(self) -> int:
            return 31

    same, again, other, longer = (windows(s) for s in (Source(), Source(), Source(fingerprint="x"), Longer()))
    assert same.identity == again.identity
    assert len({w.identity for w in (same, other, longer)}) == 3


def test_a_source_is_never_asked_by_two_threads_at_once() -> None:
    inside, both = threading.Semaphore(1), threading.Barrier(2)

    class Watchful(Source):
        def __getitem__(self, i: int) -> Any:
            assert inside.acquire(blocking=False), "two at once"
            threading.Event().wait(0.001)
            inside.release()
            return IDS

    found = windows(Watchful())

    def ask(_: int) -> None:
        both.wait()
        found.batch([0] * 10, range(10))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, range(2)))


def test_a_program_gets_its_windows_from_shoal_windows(tmp_path: Path) -> None:
    found = shoal.windows(own_run(tmp_path, "Walk", **{"data.seq_len": 4}))
    assert found.sizes == (40,)
    assert found.batch([0, 0], [0, 1]).targets.tolist() == [[1, 2, 3, 4], [2, 4, 6, 8]]
