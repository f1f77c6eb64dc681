"""Sampled replay in real training: a rank that computes wrongly is named, and nothing else is disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.journal.rundir import RunDir
from shoal.train.poison import VARIABLE
from shoal.train.replay import Result, guilty
from tests.train.test_numerics import told
from tests.train.tiny import digest_of, make_data, make_run, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), documents=60)


def brief(data: Path, name: str, **changes: Any) -> Any:
    small = {"name": name, "train.steps": 7, "train.batch": 12, "resources.threads": 1}
    return make_run(data, **{**small, **changes})


@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        (3, {}),
        pytest.param(2, {"mesh.dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param(3, {"mesh.dp_shard": 3}, marks=pytest.mark.slow),
        pytest.param(2, {"mesh.tp": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"mesh.pp": 2, "mesh.micro_batch": 6}, marks=pytest.mark.slow),
        pytest.param(4, {"mesh.dp_shard": 2, "mesh.tp": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"model.experts": {"count": 4, "top_k": 2, "ffn_dim": 32}}, marks=pytest.mark.slow),
    ],
)
def test_a_replay_after_each_step_finds_nothing_and_changes_nothing(
    data: Path, tmp_path: Path, world: int, mesh: dict[str, Any]
) -> None:
    without = train_on(brief(data, "without", **mesh), tmp_path, world)
    run_dir = train_on(brief(data, "with", **mesh, **{"guard.replay": 1}), tmp_path, world)
    assert told(run_dir, "silent-corruption") == []
    assert digest_of(run_dir) == digest_of(without)


@pytest.mark.parametrize(
    ("world", "mesh", "named"),
    [
        (3, {}, [1]),
        (2, {}, [0, 1]),  # both are steady and differ: there is no third to ask
        pytest.param(3, {"mesh.dp_shard": 3}, [1], marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_computes_wrongly_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, mesh: dict[str, Any], named: list[int]
) -> None:
    monkeypatch.setenv(VARIABLE, "wrong@1:4")
    with pytest.raises(
        AssertionError, match=r"silent corruption: (one of ranks 0, 1|rank 1) computes wrongly after step 4"
    ):
        train_on(brief(data, "wrong", **mesh, **{"guard.replay": 1}), tmp_path, world)
    (record,) = told(RunDir.of("wrong", tmp_path), "silent-corruption")
    assert (record["step"], record["ranks"], record["agreed"]) == (4, named, 3)


def test_the_third_computation_tells_who_is_wrong() -> None:
    right, wrong = (2.0, 1.0), (2.1, 1.0)
    assert guilty([Result(0, *wrong), Result(1, *right), Result(2, *right)], 0.0) == [0]
    assert guilty([Result(2, *right), Result(0, *wrong), Result(1, *right)], 0.0) == [0]
    assert guilty([Result(0, 1.0, 1.0), Result(1, 2.0, 1.0), Result(2, 3.0, 1.0)], 0.0) == [0, 1, 2]
    once = [Result(0, *wrong), Result(1, *right), Result(0, *right), Result(1, *right)]
    assert guilty(once, 0.0) == [0], "it does not agree with itself"
    always = [Result(0, *wrong), Result(1, *right), Result(0, *wrong), Result(1, *right)]
    assert guilty(always, 0.0) == [0, 1]
    alone = [Result(0, *wrong), Result(0, *right), Result(0, *right), Result(0, *right)]
    assert guilty(alone, 0.0) == [0]


def test_rounding_is_no_corruption_where_a_tolerance_is_given() -> None:
    assert Result(0, 2.0, 1.0).agrees(Result(1, 2.0001, 1.0), 1e-2)
    assert not Result(0, 2.0, 1.0).agrees(Result(1, 2.0, 1.1), 1e-2)
