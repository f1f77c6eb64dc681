"""Old checkpoints go, the newest good one never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Folder
from shoal.train.writers import AtOnce

FILE = "rank-00000.safetensors"


def save(root: Path, *steps: int, term: int = 0) -> None:
    for step in steps:
        checkpoint.save(root, step, {"w": torch.ones(3)}, {}, term)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != ledger.LEDGER)


def entries(root: Path) -> list[str]:
    return sorted(p.name for p in (root / ledger.LEDGER).iterdir())


def damage(root: Path, name: str) -> None:
    """So that only who reads the bytes sees it."""
    path = root / name / FILE
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_the_newest_are_kept_and_the_rest_is_deleted(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40)
    deleted = checkpoint.prune(tmp_path, keep=2)
    assert names(tmp_path) == ["step-00000030-term-0", "step-00000040-term-0"]
    assert entries(tmp_path) == ["published-step-00000030-term-0.json", "published-step-00000040-term-0.json"]
    assert sorted(deleted) == [Name(10, 0), Name(20, 0)]
    assert checkpoint.prune(tmp_path, keep=2) == []


def test_a_bad_one_does_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    (tmp_path / "step-00000030-term-0" / "manifest.json").unlink()
    checkpoint.prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-00000020-term-0", "step-00000030-term-0"]


def test_before_anything_is_deleted_one_that_stays_is_read_to_its_last_byte(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40)
    damage(tmp_path, "step-00000040-term-0")
    heard: list[str] = []
    assert checkpoint.prune(tmp_path, keep=2, on_bad=lambda bad: heard.append(str(bad))) == [Name(10, 0)]
    assert names(tmp_path) == [f"step-000000{n}-term-0" for n in (20, 30, 40)]
    assert len(heard) == 1
    assert heard[0].startswith("step-00000040-term-0: ")
    assert "checksum does not match" in heard[0]
    # It is quarantined: nobody reads it again, and it does not count as kept.
    assert checkpoint.prune(tmp_path, keep=2, on_bad=lambda bad: heard.append(str(bad))) == []
    assert len(heard) == 1
    save(tmp_path, 50)
    assert checkpoint.prune(tmp_path, keep=2) == [Name(20, 0)]
    found = checkpoint.newest(tmp_path, verify=True)
    assert found is not None
    assert found.step == 50


def test_a_damaged_one_goes_when_all_that_are_kept_are_newer(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    damage(tmp_path, "step-00000020-term-0")
    checkpoint.prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-00000010-term-0", "step-00000020-term-0"]
    save(tmp_path, 30)
    assert sorted(checkpoint.prune(tmp_path, keep=1)) == [Name(10, 0), Name(20, 0)]
    assert entries(tmp_path) == ["published-step-00000030-term-0.json"]


@pytest.mark.parametrize("keep", [1, 0, -1])
def test_the_last_good_one_stays_whatever_is_asked(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 10)
    checkpoint.prune(tmp_path, keep)
    assert names(tmp_path) == ["step-00000010-term-0"]


def test_nothing_is_deleted_when_nothing_is_good(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    (tmp_path / "step-00000010-term-0" / "manifest.json").unlink()
    damage(tmp_path, "step-00000020-term-0")
    damage(tmp_path, "step-00000030-term-0")
    before = entries(tmp_path)
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert len(names(tmp_path)) == 3
    assert entries(tmp_path) == before, "nor is the last hope quarantined"


def test_leftovers_of_earlier_terms_go_and_those_of_this_one_stay(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for name in (".tmp-step-00000020-term-1", ".tmp-step-00000020-term-2", ".old-step-00000005-term-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text("half")
    checkpoint.prune(tmp_path, keep=3, term=2)
    assert names(tmp_path) == [".tmp-step-00000020-term-2", "step-00000010-term-0"]
    checkpoint.prune(tmp_path, keep=3)
    assert names(tmp_path) == ["step-00000010-term-0"]


def test_what_a_fenced_writer_published_neither_counts_nor_stays_for_ever(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, term=1)
    store = Folder(tmp_path)
    store.put(f"{ledger.LEDGER}/{ledger.Claim(2, 20, 'aa')}", b"{}")
    assert checkpoint.prune(tmp_path, keep=2) == [], "30 is of a branch that was left: 10 and 20 are the newest two"
    save(tmp_path, 25, 35, term=2)
    assert checkpoint.prune(tmp_path, keep=1) == [Name(10, 1), Name(20, 1), Name(25, 2), Name(30, 1)]
    assert names(tmp_path) == ["step-00000035-term-2"]


def test_an_entry_that_the_ledger_lost_is_written_again(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    (tmp_path / ledger.LEDGER / "published-step-00000020-term-0.json").unlink()
    checkpoint.prune(tmp_path, keep=2)
    assert entries(tmp_path) == ["published-step-00000010-term-0.json", "published-step-00000020-term-0.json"]


def test_steps_are_ordered_by_number_and_not_by_name(tmp_path: Path) -> None:
    save(tmp_path, 99_999_999, 100_000_000)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 100_000_000


class Lying(Folder):
    """A disk that says that it has written, and has written something else."""

    def publish(self, name: str) -> None:
        super().publish(name)
        if name == "step-00000030-term-1":
            damage(self.root, name)


class State:
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(3)}

    def holders(self) -> None:
        return None

    def extra(self, step: int) -> dict[str, Any]:
        return {}


def test_a_save_that_turns_out_damaged_is_told_and_costs_no_older_one(tmp_path: Path) -> None:
    store = Lying(tmp_path)
    write = AtOnce(Setup(0, 1, 1, -1, (store.where,), None, keep=1, read_back="headers"), [store])
    for step in (10, 20, 30):
        write.begin(step, State(), durable=True, upload=False)
    told = {event.kind: event for event in write.poll()}
    assert told["bad"].step == 30
    assert "step-00000030-term-1: the bytes of 'w' in rank-00000.safetensors are not those" in told["bad"].error
    assert names(tmp_path) == ["step-00000020-term-1", "step-00000030-term-1"]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 20


class Reading(Folder):
    """Notes what is read whole."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.manifests: list[str] = []

    def read(self, name: str) -> bytes:
        if name.endswith("manifest.json"):
            self.manifests.append(name)
        return super().read(name)


def test_pruning_reads_no_manifest_of_what_it_keeps(tmp_path: Path) -> None:
    for step in range(1, 7):
        checkpoint.save(tmp_path, step, {"w": torch.ones(3)}, {"eval_loss": float(step)})
    store = Reading(tmp_path)
    assert checkpoint.prune(store, 2, keep_best=1, known_good={Name(6, 0)}) == [Name(n, 0) for n in (2, 3, 4)]
    assert store.manifests == []
    assert ledger.summary(store, Name(6, 0)) is not None
    checkpoint.prune(store, 2, keep_best=1)
    assert store.manifests == ["step-00000006-term-0/manifest.json"], "one of those that stay is read to its last byte"


@pytest.mark.parametrize("entry", [b"{}\n", b"", b'{"world": 1}', None])
def test_what_the_ledger_does_not_know_is_read_and_noted_again(tmp_path: Path, entry: bytes | None) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"w": torch.ones(3)}, {"eval_loss": 0.5})
    path = tmp_path / ledger.LEDGER / "published-step-00000002-term-0.json"
    path.unlink() if entry is None else path.write_bytes(entry)
    store = Reading(tmp_path)
    for times in (1, 0):
        store.manifests.clear()
        checkpoint.prune(store, 3, known_good={Name(3, 0)})
        assert store.manifests == ["step-00000002-term-0/manifest.json"] * times


def test_one_whose_bytes_are_not_all_there_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"w": torch.ones(3)}, {})
    path = tmp_path / "step-00000002-term-0" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert checkpoint.prune(tmp_path, 2) == []
