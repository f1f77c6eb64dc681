"""What of the run file makes an update: Muon's rate, and what decays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.decide.auto import decide
from shoal.decide.length import with_steps
from shoal.errors import SpecError
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.spec import dump, load
from shoal.spec.begun import as_begun, differences
from shoal.spec.run import Optimizer
from shoal.train.optim import Optimizers
from tests.train.tiny import make_data, make_run

SHAPES = {
    "embed.weight": (40, 16),
    "blocks.0.square.weight": (32, 32),
    "blocks.0.tall.weight": (96, 24),
    "blocks.0.experts.up": (3, 24, 48),
    "blocks.0.norm.weight": (16,),
    "head.weight": (40, 16),
}


def moved(spec: Optimizer, steps: int = 1, zero: bool = False) -> dict[str, torch.Tensor]:
    """What so many steps have changed of each parameter, by random gradients or by none."""
    torch.manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizers = Optimizers(spec, named.items())
    for _ in range(steps):
        for p in named.values():
            p.grad = torch.zeros_like(p) if zero else torch.randn_like(p)
        optimizers.step(1.0, torch.tensor(1.0))
    return {name: p.detach() - before[name] for name, p in named.items()}


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize("lr", [1e-4, 3e-3])
def test_muons_rate_follows_the_one_rate_and_its_updates_are_as_large_as_adamws(lr: float) -> None:
    spec = Optimizer(name="muon", lr=lr, weight_decay=0.0)
    change = moved(spec)
    for name in ("blocks.0.square.weight", "blocks.0.tall.weight", "blocks.0.experts.up"):
        assert rms(change[name]) == pytest.approx(0.2 * lr, rel=0.25)  # the iteration's singular values are 0.7 to 1.2
    still = moved(Optimizer(name="muon", lr=lr, weight_decay=0.3), zero=True)
    by_adamw = moved(Optimizer(name="adamw", lr=lr, weight_decay=0.3), zero=True)
    for name in SHAPES:
        torch.testing.assert_close(still[name], by_adamw[name])  # one decay, by one rate


def test_a_rate_of_muons_own_is_what_it_was_before() -> None:
    own = moved(Optimizer(name="muon", lr=1e-9, muon_lr=0.02, weight_decay=0.0))
    assert rms(own["blocks.0.square.weight"]) == pytest.approx(0.02 / 32**0.5, rel=0.25)
    assert rms(own["blocks.0.tall.weight"]) == pytest.approx(0.02 * 2 / 96**0.5, rel=0.25)
    decayed = moved(Optimizer(name="muon", lr=1e-9, muon_lr=0.02, weight_decay=0.1), zero=True)
    assert rms(decayed["blocks.0.square.weight"]) == pytest.approx(0.002, rel=0.1)  # of values of about 1
    apart = moved(Optimizer(name="muon", lr=1e-9, muon_lr=0.02, muon_weight_decay=0.0), zero=True)
    assert not apart["blocks.0.square.weight"].any()


def test_a_run_that_began_with_a_rate_of_its_own_keeps_it(tmp_path: Path) -> None:
    """The run directory of a run from before has the number, which was the default then; its own file has nothing."""
    begun = make_run(tmp_path, **{"train.optimizer.name": "muon", "train.optimizer.muon_lr": 0.02})
    (tmp_path / "run.yaml").write_text(dump(begun))
    assert load(tmp_path / "run.yaml").run.train.optimizer.muon_lr == 0.02
    again = make_run(tmp_path, **{"train.optimizer.name": "muon"})
    assert again.train.optimizer.muon_lr == "auto"
    assert differences(begun, again, auto_is_equal=True) == []
    assert as_begun(begun, again) == begun
    assert as_begun(again, begun) == begun  # changed on purpose


def test_a_run_that_began_without_a_warm_up_goes_on_without_one(tmp_path: Path) -> None:
    """0 was the default then, and its run file says nothing of it."""
    begun = make_run(tmp_path, **{"train.schedule": {"warmup_steps": 0}, "train.steps": 100})
    again = make_run(tmp_path, **{"train.schedule": {}, "train.steps": 100})
    assert with_steps(again, tmp_path).train.schedule.warmup_steps == 5
    assert differences(begun, with_steps(as_begun(begun, again), tmp_path), auto_is_equal=True) == []


def test_embeddings_and_heads_decay_or_not() -> None:
    usual = moved(Optimizer(lr=1e-2), zero=True)
    spared = moved(Optimizer(lr=1e-2, decay_embeddings=False), zero=True)
    for name in SHAPES:
        ends = name in ("embed.weight", "head.weight")
        assert bool(usual[name].any()) == (name != "blocks.0.norm.weight")
        assert bool(spared[name].any()) == (name != "blocks.0.norm.weight" and not ends)


def test_a_z_loss_reaches_the_output_layer_and_is_refused_in_8_bits(tmp_path: Path) -> None:
    run = make_run(make_data(tmp_path / "data"), **{"train.z_loss": 1e-4})
    laid = build(decide(run, tmp_path, 1).run, Place(0, 1, torch.device("cpu")))
    assert laid.decoders[0].head.z_loss == 1e-4
    (tmp_path / "run.yaml").write_text(dump(run))
    with pytest.raises(SpecError, match="fp8_head to false"):
        load(tmp_path / "run.yaml", ["train.precision=fp8"])
    assert load(tmp_path / "run.yaml", ["train.precision=fp8", "train.fp8_head=false"]).run.train.z_loss == 1e-4
