"""A data source of the user's own stands where prepared data stood, and everything after it is the same, to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.own_windows import OwnWindows
from shoal.decide.auto import decide
from shoal.errors import DataError
from shoal.journal.rundir import RunDir
from shoal.leaving import own_place
from shoal.own.code import load as load_code
from shoal.parallel.place import join
from shoal.train.open_data import open_own
from shoal.train.worker import work
from tests.islands.archipelago import Archipelago
from tests.own.sources import RAISES_AT, own_run
from tests.ranks import _warm, rank_outcomes, run_ranks
from tests.train.test_resume import train_and_die
from tests.train.tiny import digest_of, losses_of, make_data, make_run, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Windows of several documents, and of prompts and answers with padding at their ends.
COMMON = {"train.steps": 6, "data.seq_len": 64, "model.vocab_size": 128, "mesh.micro_batch": 4}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "DDP 2": (2, {"mesh.dp_replicate": 2, "mesh.dp_shard": 1}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), masked=True)


@pytest.fixture(scope="module")
def prepared(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """The same windows, read by Shoal itself."""
    place = tmp_path_factory.mktemp("prepared")
    return {
        mesh: train_on(make_run(data, **{"name": mesh.replace(" ", "-"), **COMMON, **changes}), place, world)
        for mesh, (world, changes) in MESHES.items()
    }


def mine(workspace: Path, data: Path, name: str, **changes: Any) -> Any:
    return own_run(workspace, **{"name": name, "own.settings": {"at": str(data)}, **COMMON, **changes})


@pytest.mark.parametrize("mesh", MESHES)
def test_an_own_source_trains_to_the_bits_of_prepared_data(
    mesh: str, data: Path, prepared: dict[str, RunDir], tmp_path: Path
) -> None:
    world, changes = MESHES[mesh]
    found = train_on(mine(tmp_path, data, "mine", **changes), tmp_path, world)
    assert digest_of(found) == digest_of(prepared[mesh])
    assert np.allclose(losses_of(found), losses_of(prepared["one process"]), rtol=2e-5)


def test_islands_take_the_same_curve_from_an_own_source(
    data: Path, prepared: dict[str, RunDir], tmp_path: Path
) -> None:
    _warm()
    changes = {"fleet.islands": 2, "fleet.shards": 4}
    with Archipelago(tmp_path, mine(tmp_path, data, "isles", **changes), 1) as fleet:
        fleet.start(0, 1)
        assert fleet.wait() == {0: {0}, 1: {0}}
        assert np.allclose(losses_of(fleet.run_dir), losses_of(prepared["one process"]), rtol=2e-5)


def test_killed_and_resumed_it_ends_with_the_same_bits(data: Path, prepared: dict[str, RunDir], tmp_path: Path) -> None:
    run = mine(tmp_path, data, "killed", **{"checkpoint.every": 2, **MESHES["DDP 2"][1]})
    train_and_die(run, tmp_path, 2, 3, victim=1, saved=True)
    resumed = train_on(run, tmp_path, 2)
    assert digest_of(resumed) == digest_of(prepared["DDP 2"])


def test_a_run_does_not_go_on_with_other_data(data: Path, tmp_path: Path) -> None:
    run = mine(tmp_path, data, "moved", **{"train.steps": 2})
    train_on(run, tmp_path, 1)
    settings = {"at": str(data), "fingerprint": "another"}
    changed = decide(mine(tmp_path, data, "moved", **{"own.settings": settings}), tmp_path, 1).run
    run_dir = RunDir.of("moved", tmp_path)
    outcomes = rank_outcomes(lambda r, w: work(run_dir, changed, join(changed), lambda: False), 1)
    assert "the training data is not what run 'moved' was trained on up to step 2 (its fingerprint" in outcomes[0].error


def test_processes_that_make_different_sources_are_refused_alike(tmp_path: Path) -> None:
    run = own_run(tmp_path, "Walk")

    def rank(rank: int, world: int) -> str:
        make = load_code(run, tmp_path / "code").data
        assert make is not None
        made = type("Made", (make,), {"fingerprint": f"a walk of rank {os.environ['RANK']}"})
        try:
            open_own(made, run)
        except DataError as e:
            return str(e)
        return "taken"

    first, second = run_ranks(rank, 2)
    assert "40 windows with the fingerprint 'a walk of rank 1' here and 40 windows" in second
    assert first == f"rank 1: {second}"


def test_an_error_in_it_shows_the_users_line(tmp_path: Path) -> None:
    run = own_run(tmp_path, "Walk", **{"own.settings": {"bad": 17}})
    make = load_code(run, RunDir.of(run.name, tmp_path).code).data
    assert make is not None
    windows = OwnWindows(make, run)
    windows.batch([0, 0], [16, 18])
    with pytest.raises(KeyError, match="no page 17") as e:
        windows.batch([0, 0], [16, 17])
    assert own_place(e.value) == f"mine.py:{RAISES_AT}: "
