"""The simulation behind benchmarks/swarm_convergence.py: real models that learn together, and who spoils it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.fleet import swarm_rows as rows
from benchmarks.fleet.swarm_sim import Sea, Size, Way, every_step, prepare, swarm

from shoal.fleet.outer.rule import Rule
from tests.train.tiny import make_data

TOY = Size(dim=32, heads=2, ffn_dim=64, seq_len=32, peers=4, batch=4, steps=12, lr=1e-2)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_peers_learn_together_and_a_hostile_one_is_left_out(tmp_path: Path) -> None:
    make_data(tmp_path / "data/train")
    make_data(tmp_path / "data/eval", seed=1)
    sea = Sea(tmp_path, TOY)
    alone = every_step(sea)
    together = swarm(sea, Way("int8", Rule("int8", lr=1.0), every=3, delay=1))
    assert together.loss < alone.curve[0] - 0.5
    assert together.loss < 1.15 * alone.loss
    assert not together.out
    flipped = rows.ATTACKS["sign flipped"]
    spoilt = swarm(sea, Way("flipped", Rule("topk", lr=1.0), every=3, delay=1, attack=flipped, hostile=1))
    assert set(spoilt.out) == {"peer0"}
    assert spoilt.bytes_per_step < alone.bytes_per_step / 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_topk_keeps_up_with_every_step_data_parallelism(tmp_path: Path) -> None:
    """The benchmark's first claim with a quarter of its steps, and a wide bar: the beginning is the hardest part."""
    prepare(tmp_path)
    size = replace(rows.FULL, steps=rows.FULL.steps // 4)
    base, topk = rows.run([(None, size), (Way("topk", rows.shoal("topk")), size)], tmp_path, 2)
    assert topk.loss < 1.25 * base.loss
    assert base.bytes_per_step > rows.TRAFFIC * topk.bytes_per_step
