"""Old checkpoints go, the newest good one never does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal import checkpoint


def save(root: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(root, step, {"w": torch.ones(3)}, {})


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_the_newest_are_kept_and_the_rest_is_deleted(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40)
    deleted = checkpoint.prune(tmp_path, keep=2)
    assert names(tmp_path) == ["step-00000030", "step-00000040"]
    assert sorted(p.name for p in deleted) == ["step-00000010", "step-00000020"]
    assert checkpoint.prune(tmp_path, keep=2) == []


def test_a_bad_one_does_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    (tmp_path / "step-00000030" / "manifest.json").unlink()
    checkpoint.prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize("keep", [1, 0, -1])
def test_the_last_good_one_stays_whatever_is_asked(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 10)
    checkpoint.prune(tmp_path, keep)
    assert names(tmp_path) == ["step-00000010"]


def test_nothing_is_deleted_when_nothing_is_good(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    for step in (10, 20):
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert len(names(tmp_path)) == 2


def test_leftovers_of_earlier_attempts_go_and_those_of_this_one_stay(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for name in (".tmp-step-00000020-attempt-1", ".tmp-step-00000020-attempt-2", ".bad-step-00000010"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_text("half")
    checkpoint.prune(tmp_path, keep=3, attempt=2)
    assert names(tmp_path) == [".tmp-step-00000020-attempt-2", "step-00000010"]
    checkpoint.prune(tmp_path, keep=3)
    assert names(tmp_path) == ["step-00000010"]


def test_steps_are_ordered_by_number_and_not_by_name(tmp_path: Path) -> None:
    save(tmp_path, 99_999_999, 100_000_000)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 100_000_000
