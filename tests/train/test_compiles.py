"""A run compiles in its first steps and never again, whichever documents its batches hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch._dynamo.utils import counters

from shoal.decide.auto import decide
from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.spec import dump
from shoal.train import loop
from shoal.train.worker import work
from tests.ranks import run_ranks
from tests.train.tiny import make_data, make_run

STEPS = 200
# Windows so short that now and then all of a batch lie within one document each.
SMALL = {
    "data.seq_len": 20,
    "train.batch": 4,
    "mesh.micro_batch": 4,
    "model.dim": 8,
    "model.layers": 1,
    "model.heads": 2,
    "model.ffn_dim": 8,
}


def test_in_200_steps_of_random_documents_nothing_is_compiled_after_the_second(tmp_path: Path) -> None:
    run = make_run(make_data(tmp_path / "data"), **{**SMALL, "train.steps": STEPS, "train.compile": True})
    decided, run_dir = decide(run, tmp_path, 1).run, RunDir.of(run.name, tmp_path)
    assert decided.train.compile is True
    run_dir.path.mkdir(parents=True)
    run_dir.spec_file.write_text(dump(decided))

    def rank(rank: int, world: int) -> tuple[list[int], list[bool]]:
        compiled: list[int] = []
        kinds: list[bool] = []
        step, compile_it = loop.train_step, nn.Module.compile

        def counted(t: loop.Training, number: int, gradient: Any) -> Any:
            kinds.extend(bool(b.documents.any()) for b in t.feed.assemble(number))
            record = step(t, number, gradient)
            compiled.append(counters["stats"]["unique_graphs"])
            return record

        with pytest.MonkeyPatch.context() as patch:
            # What is traced, and how often, is the same with a backend that is quick.
            patch.setattr(nn.Module, "compile", lambda self, options: compile_it(self, backend="eager"))
            patch.setattr(loop, "train_step", counted)
            work(run_dir, decided, join(decided), lambda: False)
        return compiled, kinds

    for compiled, kinds in run_ranks(rank, 1, timeout_s=120):
        assert len(compiled) == STEPS
        assert all(kinds[:2])
        assert not all(kinds), "the data must have batches of both kinds, and one of them late"
        assert compiled[0] > 0
        assert compiled[-1] == compiled[1], [i for i in range(1, STEPS) if compiled[i] > compiled[i - 1]]
