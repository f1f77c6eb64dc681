"""An island that is slower than the others is named, with what it is slow in; by policy it leaves and comes back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.islands import pace
from shoal.islands.loop import Work
from shoal.journal.journal import records
from shoal.observe.faults import faults_of
from shoal.readable import straggler as in_words
from tests.islands.archipelago import Archipelago
from tests.ranks import _warm
from tests.slow import some_slow
from tests.train.tiny import make_data, make_run

STEP_S = 0.05
SLOW_S, USUAL_S = 100.0, 25.0  # only said, not waited for: what a busy machine adds to it is nothing beside it


def said(island: int, shards: int, data_s: float, compute_s: float) -> dict[str, Any]:
    return {"island": island, "shards": list(range(shards)), "seconds": {"data": data_s, "forward": compute_s}}


def look(monkeypatch: pytest.MonkeyPatch, *islands: dict[str, Any]) -> list[tuple[int, str]]:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watched, found = pace.Pace(), []
    for _ in range(60):
        found += watched.heard(islands)
        now += 1.0
    return [(slow.rank, slow.phase) for slow in found]


def test_who_is_slow_and_in_what(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, said(0, 4, 0.1, 0.5), said(1, 4, 0.1, 0.9), said(2, 4, 0.1, 0.5)) == [(1, "compute")]
    assert look(monkeypatch, said(0, 4, 0.1, 0.5), said(1, 4, 0.9, 0.5), said(2, 4, 0.1, 0.5)) == [(1, "data")]


def test_who_has_more_to_do_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, said(0, 4, 0.1, 0.5), said(1, 8, 0.2, 1.0), said(2, 4, 0.1, 0.5)) == []


@pytest.mark.parametrize("policy", some_slow(["wait", "evict"], slow=["wait"]))
def test_a_slow_island_is_told_and_leaves_if_it_is_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    _warm()
    monkeypatch.setattr(pace, "WINDOW_S", 0.2)
    monkeypatch.setattr(pace, "REST_S", 0.1)
    real = Work.compute

    def slow(self: Work, shards: list[int], clock: Any) -> None:
        real(self, shards, clock)
        slow = os.environ["SHOAL_ISLAND"] == "0" and self._t.rests == 0  # the first one; it gets better
        time.sleep(STEP_S)
        clock.lap("compute_s")
        clock.laps["compute_s"] += SLOW_S if slow else USUAL_S

    monkeypatch.setattr(Work, "compute", slow)
    changes = {"fleet.islands": 3, "fleet.shards": 8, "train.steps": 60, "guard.on_straggler": policy}
    with Archipelago(tmp_path, make_run(make_data(tmp_path / "data"), name="slow", **changes)) as fleet:
        fleet.start(0, 1, 2)
        assert fleet.wait() == {0: {0}, 1: {0}, 2: {0}}
        assert [r["step"] for r in fleet.journal("step")] == list(range(1, 61))
        told = fleet.journal("straggler")[0]  # with windows as short as these a busy machine may make more of them
        assert (told["island"], told["phase"], told["action"]) == (0, "compute", policy)
        assert "island 0 is slow in compute: " in in_words(told)
        left = [r["left"] for r in fleet.journal("epoch") if r["left"]]
        faults = [(f.cause, f.island) for f in faults_of(records(fleet.run_dir.journal_file))]
        if policy == "wait":
            assert not left
            assert not faults
        else:
            assert {"0": "left"} in left
            assert ("straggler", 0) in faults
            assert any(0 in r["joined"] for r in fleet.journal("epoch")[1:])  # it came back
