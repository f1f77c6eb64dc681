"""Bytes through memory: what a step needs at least, by the same formulas that its time is planned with."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.plan.catalogue import find
from shoal.plan.moved import moved_bytes
from shoal.plan.search import priced
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.run import Run
from tests.plan.asked import asked


def closed(seq: int = 4096, batch: int = 8, micro: int = 8, recompute: str = "none", **train: Any) -> Run:
    mesh = {**dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1), "micro_batch": micro}
    run = asked("llama3.2-1b", 1, batch, "h200", seq, **mesh, recompute=recompute).run
    return run.model_copy(
        update={
            "resources": run.resources.model_copy(update={"device": "cuda", "processes": 1}),
            "train": run.train.model_copy(update={"precision": "bf16", "kernels": "triton", "compile": True, **train}),
        }
    )


def moved(run: Run) -> float:
    return moved_bytes(run, asked("llama3.2-1b", 1, 1, "h200").shape, find("h200"))


def test_it_is_at_least_the_weights_the_state_and_the_activations() -> None:
    shape = asked("llama3.2-1b", 1, 1, "h200").shape
    tokens = 8 * 4096
    # Each weight is read three times in 16 bits and updated in 32; every product's rows are read and written.
    least = shape.params * (3 * 2 + 28) + tokens * shape.layers * 3 * 2 * (4 * shape.dim + 3 * shape.ffn_dim)
    assert least < moved(closed()) < 6 * least


def test_no_step_is_planned_faster_than_its_bytes_can_be_moved() -> None:
    """The plan knows the bandwidth, too: what it predicts leaves the achieved share below one."""
    device = find("h200")
    for seq, batch, micro in ((4096, 8, 8), (4096, 8, 1), (512, 4, 4)):
        question = asked("llama3.2-1b", 1, batch, "h200", seq)
        run = closed(seq, batch, micro)
        seconds = priced(question, Layout(Sizes(), micro), "none").seconds
        assert moved(run) / seconds < device.bandwidth_tbs * 1e12


def test_more_is_moved_by_recomputing_and_by_smaller_micro_batches() -> None:
    once = moved(closed())
    assert moved(closed(recompute="full")) == pytest.approx(1.2 * once, rel=0.1)
    assert moved(closed(micro=1)) > 1.05 * once
    assert moved(closed(batch=16)) == pytest.approx(2 * once, rel=0.1)
