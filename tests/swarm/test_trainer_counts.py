"""A swarm counts and weighs what was learned, and tries parts on what nobody learns from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.order import Order
from shoal.data.shards import TokenShards
from shoal.data.windows import Windows
from shoal.swarm.offer import _part_objection
from shoal.swarm.outer.robust import learned
from shoal.swarm.round_record import BadRecord, Part, Record
from shoal.swarm.trainer.keeper import Work
from shoal.swarm.trainer.mesh import InnerStep
from shoal.swarm.trainer.round import Round
from shoal.swarm.trainer.samples import Samples
from shoal.swarm.trainer.scoring import Pool, first_epoch
from shoal.swarm.trainer.trainer import Logbook
from shoal.swarm.trainer_words import Handed, read
from shoal.values import BadValue
from tests.train.tiny import make_data, make_run

HIDDEN = {"peer": "a", "blob": "x", "tokens": 1000, "targets": 100, "loss": 2.0, "used": [[0, 8]]}
PLAIN = {"peer": "b", "blob": "y", "tokens": 1000, "targets": 900, "loss": 4.0, "used": [[8, 16]]}


def test_a_part_says_its_targets_and_a_step_of_the_run_counts_them(tmp_path: Path) -> None:
    round = Round(1, Samples([(0, 8)]), 0, 1.0)
    round.took(InnerStep(2.0, targets=100, tokens=1000, grad_norm=1.0, lr=0.1), 0.5)
    assert {"tokens": 1000, "targets": 100}.items() <= round.work.said().items()
    told: list[dict[str, Any]] = []
    run = make_run(make_data(tmp_path / "data", documents=8), **{"train.batch": 16})
    record = {"round": 1, "took": [HIDDEN, PLAIN], "ledger": {"done": 16}}
    Logbook(run, lambda kind, **fields: told.append(fields)).applied(record, [], 0.1)
    assert (told[0]["tokens"], told[0]["targets"]) == (2000, 1000)
    assert told[0]["loss"] == pytest.approx(0.1 * 2.0 + 0.9 * 4.0)  # the mean over targets


def test_a_part_weighs_by_its_targets_and_one_that_does_not_say_them_is_refused() -> None:
    assert [learned(HIDDEN), learned(PLAIN)] == [100, 900]
    part = Part("a" * 64, 1, "b" * 64, 10, 1000, 1, ((0, 8),), targets=100)
    assert Part.of(part.body()) == part
    silent = {key: value for key, value in part.body().items() if key != "targets"}
    for said in (silent, {**silent, "targets": None}):
        with pytest.raises(BadRecord, match="does not say how many targets"):
            Part.of(said)
    handed = {"kind": "part", "round": 1, "path": "x", "tokens": 9, "steps": 1, "used": [[0, 8]]}
    with pytest.raises(BadValue, match="part: targets"):
        read(json.dumps(handed).encode())
    assert isinstance(read(json.dumps({**handed, "targets": 3}).encode()), Handed)


def test_work_of_parts_that_came_back_keeps_its_targets() -> None:
    work = Work(used=[[0, 4]], tokens=40, steps=1, loss_sum=20.0, targets=10)
    work.add(Work(used=[[4, 8]], tokens=40, steps=1, loss_sum=90.0, targets=30))
    assert {"targets": 40, "tokens": 80, "loss": 2.75}.items() <= work.said().items()


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    folder = tmp_path_factory.mktemp("data")
    sets = [make_data(folder / str(n), documents=n, seed=n) for n in (80, 300)]
    return Windows([TokenShards.open(str(path)) for path in sets], 8, True)


def pairs(sources: np.ndarray, ids: np.ndarray) -> set[tuple[int, int]]:
    return set(zip(sources.tolist(), ids.tolist(), strict=True))


@pytest.mark.parametrize("several", [False, True])
def test_parts_are_tried_on_windows_that_are_never_trained_on(several: bool, windows: Windows) -> None:
    if not several:
        windows = Windows(windows.sources[1:], 8, True)
    order = Order(windows.sizes, [0.22, 0.78] if several else [1.0], seed=3)
    fresh = first_epoch(order)
    assert fresh > 700
    for trained in (0, fresh // 2, fresh - 5):
        pool = Pool.of(windows, order, trained, None)
        assert pool.size == fresh - trained
        tried = pairs(*pool.pick(range(pool.size)))
        assert len(tried) == pool.size
        assert not tried & pairs(*order.at(0, trained))
    assert Pool.of(windows, order, fresh, None).size == 0  # all of it is trained on
    assert Pool.of(windows, order, 10 * fresh, None).size == 0


def test_held_out_windows_are_tried_first_and_each_is_reached(windows: Windows) -> None:
    order = Order((5,), [1.0], seed=3)
    pool = Pool.of(windows, order, 1000, windows)
    assert pool.windows is windows
    assert pool.size == sum(windows.sizes)
    found = pairs(*pool.pick(range(pool.size)))
    assert found == {(k, i) for k, size in enumerate(windows.sizes) for i in range(size)}


def test_a_part_with_more_targets_than_tokens_is_refused() -> None:
    peer = "a" * 64
    head = Record("start", 0, (), (peer,))
    record = Record("round", 1, (head.hash,), (peer,))
    part = Part(peer, 1, "b" * 64, 10, 1000, 1, ((0, 8),), targets=1001)
    assert _part_objection(part, record, head, 100, 1000) == "1001 targets among 1000 tokens"
    assert "targets" not in str(_part_objection(replace(part, targets=1000), record, head, 100, 1000))
