"""Garbage is collected by hand, at the same steps on every rank."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.decide.auto import decide
from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.spec import dump
from shoal.train import collect, loop
from shoal.train.worker import work
from tests.ranks import run_ranks
from tests.train.tiny import make_data, make_run

STEPS = 8
SMALL = {"train.steps": STEPS, "train.batch": 8, "mesh.micro_batch": 2}


def test_it_is_switched_off_meanwhile_and_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with collect.by_hand():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}, {"pp": 2}], ids=str)
def test_all_ranks_collect_at_the_same_steps_and_cycles_hold_no_activations(
    mesh: dict[str, int], tmp_path: Path
) -> None:
    run = make_run(make_data(tmp_path / "data"), **SMALL, **{f"mesh.{axis}": n for axis, n in mesh.items()})
    decided, run_dir = decide(run, tmp_path, 2).run, RunDir.of(run.name, tmp_path)
    run_dir.path.mkdir(parents=True)
    run_dir.spec_file.write_text(dump(decided))

    def rank(rank: int, world: int) -> tuple[list[int], int]:
        collected: list[int] = []
        taken = held = 0
        step = loop.train_step

        def noted(t: loop.Training, number: int, gradient: Any) -> Any:
            nonlocal taken, held
            record = step(t, number, gradient)
            taken = 0 if number == STEPS - 1 else number + 1
            if number == STEPS - 2:  # a step of cycles, as a collection would find them
                taken = 0
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                held = sum(x.numel() for x in gc.garbage if isinstance(x, torch.Tensor))
                gc.set_debug(0)
                gc.garbage.clear()
            return record

        def saw(phase: str, info: dict[str, int]) -> None:
            if phase == "start" and taken:
                collected.append(taken)

        gc.callbacks.append(saw)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collect, "EVERY_STEPS", 3)
            patch.setattr(loop, "train_step", noted)
            work(run_dir, decided, join(decided), lambda: False)
        return collected, held

    for collected, held in run_ranks(rank, 2):
        assert collected == [3, 6]
        assert held < 1000, "numbers in tensors that nobody but a cycle holds"
