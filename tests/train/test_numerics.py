"""Numbers that are none and losses that spike, in real training: skipped, rewound, bounded, journaled, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.spec.run import Run
from shoal.train.poison import VARIABLE
from tests.train.tiny import digest_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def told(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [r for r in journal.records(run_dir.journal_file) if r["kind"] == kind]


def positions(run_dir: RunDir) -> dict[int, int]:
    """step → batch, of the records that count"""
    return {r["step"]: r["position"] // r["samples"] for r in steps_of(run_dir)}


def short(data: Path, name: str, **changes: Any) -> Run:
    return make_run(data, **{"name": name, "train.steps": 10, "resources.threads": 1, **changes})


MESHES = [
    (1, {}),
    (2, {}),
    (2, {"mesh.dp_shard": 2}),
    (1, {"train.optimizer.moments": "bf16"}),  # launched before the numbers are known: the update skips itself
    pytest.param(2, {"mesh.tp": 2}, marks=pytest.mark.slow),
    pytest.param(2, {"mesh.pp": 2, "mesh.micro_batch": 8}, marks=pytest.mark.slow),
    pytest.param(4, {"mesh.dp_shard": 2, "mesh.cp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_a_batch_whose_gradient_is_no_number_is_skipped_as_if_told_from_the_start(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, mesh: dict[str, Any]
) -> None:
    told_to = train_on(short(data, "told", **mesh, **{"data.skip": [4, 7]}), tmp_path, world)
    monkeypatch.setenv(VARIABLE, f"nan@{world - 1}:4,7")
    run_dir = train_on(short(data, "found", **mesh), tmp_path, world)
    assert digest_of(run_dir) == digest_of(told_to)
    assert [(r["step"], r["batch"], r["grad_norm"]) for r in told(run_dir, "skip")] == [(5, 4, "nan"), (7, 7, "nan")]
    assert positions(run_dir) == positions(told_to)
    assert list(positions(run_dir).values()) == [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]


def test_a_mixture_of_experts_forgets_the_loads_of_a_skipped_batch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"model.experts": {"count": 4, "top_k": 2, "ffn_dim": 32}, "train.steps": 5}
    told_to = train_on(short(data, "told", **experts, **{"data.skip": [2]}), tmp_path, 1)
    monkeypatch.setenv(VARIABLE, "nan:2")
    assert digest_of(train_on(short(data, "found", **experts), tmp_path, 1)) == digest_of(told_to)


def test_more_in_a_row_than_allowed_stop_the_run_before_any_update(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "nan:4-7")
    run = short(data, "row")
    with pytest.raises(AssertionError, match=r"NumericsError: step 5 has loss .*3 in a row.*lower train.optimizer.lr"):
        train_on(run, tmp_path, 2)
    run_dir = RunDir.of("row", tmp_path)
    assert [r["batch"] for r in told(run_dir, "skip")] == [4, 5, 6]
    assert max(positions(run_dir)) == 4


def test_too_many_here_and_there_stop_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nan:1,3,5,7")
    with pytest.raises(AssertionError, match=r"NumericsError: step 5 has .*0 in a row, 3 in 1000 steps"):
        train_on(short(data, "many", **{"guard.skips": 1}), tmp_path, 1)


def test_a_run_that_should_stop_does(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nan:4")
    with pytest.raises(AssertionError, match=r"NumericsError: step 5 has loss .*so no update was made: lower"):
        train_on(short(data, "stop", **{"guard.numerics": "stop"}), tmp_path, 1)
    assert told(RunDir.of("stop", tmp_path), "skip") == []


@pytest.mark.parametrize(("saved_at", "killed_at"), [(3, 6), (6, 8)], ids=["before the skip", "after it"])
def test_a_killed_run_that_has_skipped_a_batch_resumes_to_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_at: int, killed_at: int
) -> None:
    told_to = train_on(short(data, "told", **{"data.skip": [4]}), tmp_path, 2)
    run = short(data, "killed", **{"checkpoint.every": saved_at})
    monkeypatch.setenv(VARIABLE, f"nan@1:4;kill@0:{killed_at}")
    with pytest.raises(AssertionError, match="SIGKILL"):
        train_on(run, tmp_path, 2)
    monkeypatch.delenv(VARIABLE)  # a fault that does not come again: the batch is left out all the same
    run_dir = train_on(run, tmp_path, 2)
    assert told(run_dir, "start")[-1]["step"] == saved_at
    assert digest_of(run_dir) == digest_of(told_to)
    assert positions(run_dir) == positions(told_to)


def test_what_was_skipped_is_in_the_checkpoint_where_there_is_no_journal(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_to = train_on(short(data, "told", **{"data.skip": [4]}), tmp_path, 1)
    run = short(data, "lost", **{"checkpoint.every": 6})
    monkeypatch.setenv(VARIABLE, "nan:4;kill:9")
    with pytest.raises(AssertionError, match="SIGKILL"):
        train_on(run, tmp_path, 1)
    RunDir.of("lost", tmp_path).journal_file.unlink()
    monkeypatch.delenv(VARIABLE)
    run_dir = train_on(run, tmp_path, 1)
    assert told(run_dir, "start")[-1]["step"] == 6
    assert digest_of(run_dir) == digest_of(told_to)
