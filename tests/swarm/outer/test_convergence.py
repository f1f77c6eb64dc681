"""The simulation behind benchmarks/swarm_convergence.py: real models that learn together, and who spoils it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.fleet import swarm_rows as rows
from benchmarks.fleet.stacked_parts import arrives
from benchmarks.fleet.stacked_swarm import Course, sail
from benchmarks.fleet.swarm_sim import Sea, Size, Way, every_step, swarm

from shoal.codec import codec
from shoal.swarm.outer.rule import Rule
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


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "2bit", "topk"])
def test_parts_of_a_stack_are_what_the_codec_sends(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(2, 20_000, generator=generator) * torch.rand(20_000, generator=generator)
    parts[:, 4096:8192] = 0
    rule = Rule(name)
    real = codec(name, chunk=rule.chunk, keep=rule.keep)
    for part, arrived in zip(parts, arrives(rule, parts), strict=True):
        decoded = np.zeros(len(part), np.float32)
        real.add(real.encode(part.numpy()), decoded, 1.0)
        np.testing.assert_array_equal(decoded, arrived.numpy())


def test_a_stack_of_models_learns_as_the_models_do(tmp_path: Path) -> None:
    make_data(tmp_path / "data/train")
    make_data(tmp_path / "data/eval", seed=1)
    sea = Sea(tmp_path, TOY)
    ways = {
        "2bit, momentum": Rule("2bit", lr=0.8, momentum=0.6, feedback=1.0, robust=False),
        "topk": Rule("topk", lr=2.5, robust=False),
        "fragments": Rule("bf16", lr=0.7, momentum=0.9, feedback=0.0, fragments=2, robust=False),
    }
    single = [every_step(sea), *(swarm(sea, Way(name, rule, every=3, delay=1)) for name, rule in ways.items())]
    courses = [Course("every step", TOY.lr), *(Course(name, TOY.lr, rule, 3, 1) for name, rule in ways.items())]
    for one, stacked in zip(single, sail(sea, courses, torch.device("cpu")), strict=True):
        assert stacked.loss == pytest.approx(one.loss, rel=1e-3)
        assert stacked.bytes_per_step == pytest.approx(one.bytes_per_step, rel=0.01)
