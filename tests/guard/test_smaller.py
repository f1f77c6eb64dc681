"""A device that runs out of memory gets fewer windows at once, if nobody but Shoal has said how many."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.guard.fake import FakeRun

from shoal.guard.classify import Failure
from shoal.guard.history import History
from shoal.guard.smaller import smaller
from shoal.spec import load
from shoal.spec.run import Run

FULL = {"say": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "do": "exit", "code": 75}
FAILED = Failure(0, "device-memory", "CUDA out of memory")


def run(**mesh: Any) -> Run:
    sizes = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
    return Run.model_validate(
        {"name": "r", "data": {"train": "d"}, "train": {"steps": 9, "batch": 24}, "mesh": {**sizes, **mesh}}
    )


@pytest.fixture
def chosen(tmp_path: Path) -> History:
    history = History(tmp_path / "journal.jsonl")
    history.auto["mesh.micro_batch"] = {}
    return history


@pytest.mark.parametrize(
    ("mesh", "to"),
    [
        ({"micro_batch": 24}, 12),
        ({"micro_batch": 12, "dp_shard": 2}, 6),
        ({"micro_batch": 3}, 1),
        ({"micro_batch": 1}, None),
        ({"micro_batch": 6, "pp": 2, "schedule": "1f1b"}, 3),
    ],
)
def test_at_most_half_of_them_that_still_divides_the_batch(
    chosen: History, mesh: dict[str, Any], to: int | None
) -> None:
    found = smaller(run(**mesh), FAILED, chosen)
    assert (found and found.value) == to
    if found:
        assert found.run.mesh.micro_batch == to
        assert found.run.train == run(**mesh).train


def test_what_a_person_said_stays_and_so_does_what_failed_otherwise(chosen: History) -> None:
    assert smaller(run(micro_batch=8), Failure(0, "killed", ""), chosen) is None
    chosen.auto.clear()
    assert smaller(run(micro_batch=8), FAILED, chosen) is None


def test_the_next_attempt_has_half_and_the_journal_says_why(fake: FakeRun) -> None:
    fake.plan({"attempt": 0, "rank": 0, "step": 1, **FULL}, {"attempt": 1, "rank": 0, "step": 1, **FULL}, world=1)
    fake.run = fake.run.model_copy(update={"mesh": run(micro_batch=8).mesh})
    by_shoal = SimpleNamespace(key="mesh.micro_batch", value=8, why="it fits")
    assert fake.supervise(decisions=[by_shoal]) == 0
    assert [(d["value"], d["why"]) for d in fake.records("decision")[1:]] == [
        (4, "the device ran out of memory with 8 windows at once"),
        (2, "the device ran out of memory with 4 windows at once"),
    ]
    assert all("restart 1 of" in f["action"] for f in fake.records("failure"))
    assert fake.records("failure")[0]["action"].endswith("with mesh.micro_batch 4")
    assert load(fake.run_dir.spec_file).run.mesh.micro_batch == 2
