"""Own code on islands: one is killed, comes back and is given the state of the others, hooks and optimizer too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.islands.archipelago import Archipelago
from tests.own.test_own_code import ALL, EXAMPLE
from tests.train.tiny import digest_of, losses_of, make_data, make_run

APART = {"fleet.islands": 2, "fleet.shards": 2, "fleet.deterministic": True, "train.steps": 24}


def islands(folder: Path, name: str, **changes: Any) -> Archipelago:
    run = make_run(folder / "data", **{**ALL, "name": name, "own.folder": str(folder), **APART, **changes})
    return Archipelago(folder, run)


def test_an_island_with_own_code_that_was_killed_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    make_data(tmp_path / "data")
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    with islands(tmp_path, "calm") as calm:
        calm.start(0, 1)
        assert calm.wait() == {0: {0}, 1: {0}}
    with islands(tmp_path, "killed") as killed:
        killed.start(0, 1)
        killed.wait_for_step(5)
        killed.kill(1)
        killed.start(1)
        assert killed.wait() == {0: {0}, 1: {0}}
    assert digest_of(killed.run_dir) == digest_of(calm.run_dir)
    np.testing.assert_array_equal(losses_of(killed.run_dir), losses_of(calm.run_dir))
    told = [{r["step"]: r["values"] for r in a.journal("metrics")} for a in (calm, killed)]
    assert told[0].keys() == set(range(1, 25))
    assert told[0] == told[1]  # also the largest norm, which the hook of the first island remembers
