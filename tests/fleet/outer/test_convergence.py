"""The simulation behind benchmarks/swarm_convergence.py: real models that learn together, and who spoils it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.fleet import swarm_rows as rows
from benchmarks.fleet.swarm_sim import Sea, Size, Way, every_step, swarm

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
