"""A mixture of experts through the real worker: it learns, its routers even out, and all of it survives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.checkpoint import newest, read_full
from shoal.checkpoint.foreign.start_from import load_weights
from shoal.cli.main import main
from shoal.journal.rundir import RunDir
from shoal.model.decoder import Decoder
from shoal.spec import load
from shoal.spec.shape import shape_of
from shoal.train.muon import Muon, orthogonalise
from tests.model.families import logits, opened
from tests.ranks import run_ranks
from tests.train.tiny import digest_of, losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

EXPERTS: dict[str, Any] = {"count": 8, "top_k": 2, "ffn_dim": 32, "balance_rate": 0.01}
MIXTRAL: dict[str, Any] = {"model.family": "mixtral", "model.experts": EXPERTS}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("moe") / "data")


def biases_of(run_dir: RunDir) -> dict[str, torch.Tensor]:
    found = newest(run_dir.checkpoints)
    assert found is not None
    return {name: t for name, t in read_full(found).items() if name.endswith("ffn.bias")}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns_and_its_biases_move_against_the_loads(optimizer: str, data: Path, tmp_path: Path) -> None:
    changes = {"name": optimizer, "train.steps": 20, "train.optimizer.name": optimizer, **MIXTRAL}
    run_dir = train_on(make_run(data, **changes), tmp_path, 1)
    losses, steps = losses_of(run_dir), steps_of(run_dir)
    assert losses[-1] < 0.9 * losses[0]
    assert all(1 < step["expert_imbalance"] < 4 for step in steps)  # eight experts: 4 is two of them for all
    biases = biases_of(run_dir)
    assert set(biases) == {"blocks.0.ffn.bias", "blocks.1.ffn.bias"}
    assert all(bias.abs().max() >= 0.005 for bias in biases.values())  # of steps of 0.01, to and fro


@pytest.mark.parametrize("way", ["balance_rate", "balance_loss"])
def test_stopped_and_resumed_it_ends_with_the_same_bits(way: str, data: Path, tmp_path: Path) -> None:
    off = {"balance_rate": 0.0, "balance_loss": 0.0}
    fixed = {"train.steps": 6, "checkpoint.every": 2, **MIXTRAL, "model.experts": EXPERTS | off | {way: 0.1}}
    whole = train_on(make_run(data, name="whole", **fixed), tmp_path, 1)
    run = make_run(data, name="stopped", **fixed)
    asked = iter([False] * 3 + [True])
    with pytest.raises(AssertionError, match="Stopped"):
        train_on(run, tmp_path, 1, told_to_stop=lambda: next(asked))
    again = train_on(run, tmp_path, 1)
    assert digest_of(again) == digest_of(whole)
    for name, bias in biases_of(whole).items():
        assert torch.equal(biases_of(again)[name], bias), name


def test_recomputation_changes_neither_the_curve_nor_the_biases(data: Path, tmp_path: Path) -> None:
    fixed = {"train.steps": 3, "mesh.micro_batch": 8, **MIXTRAL}
    runs = [
        train_on(make_run(data, name=mode, **fixed, **{"mesh.recompute": mode}), tmp_path, 1)
        for mode in ("none", "selective", "full")
    ]
    for run_dir in runs[1:]:
        np.testing.assert_allclose(losses_of(run_dir), losses_of(runs[0]), rtol=1e-6)
        for name, bias in biases_of(runs[0]).items():
            assert torch.equal(biases_of(run_dir)[name], bias), name


def test_a_run_is_exported_and_sampled_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the class that holds the biases, what is exported says what the run says."""
    (tmp_path / "text.txt").write_text("the whale swims in the deep sea. " * 100)
    prepare = ["data", "prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data"), "--workers", "1"]
    assert main(prepare) == 0
    dots1 = {"model.family": "dots1", "model.qk_norm": True, "data.seq_len": 64, "train.batch": 8}
    experts = EXPERTS | {"score": "sigmoid", "shared": 1, "dense_layers": 1}
    train_on(make_run(tmp_path / "data", **dots1, **{"train.steps": 15, "model.experts": experts}), tmp_path, 1)
    capsys.readouterr()
    place = ["--workspace", str(tmp_path)]
    assert main(["checkpoint", "export", "tiny", str(tmp_path / "hf"), *place]) == 0
    capsys.readouterr()
    said = []
    for source in (["tiny"], ["--weights", str(tmp_path / "hf")]):
        assert main(["sample", *source, "--prompt", "the ", "--max-tokens", "20", "--json", *place]) == 0
        said.append(json.loads(capsys.readouterr().out)["text"])
    assert said[0] == said[1]


def test_what_a_class_cannot_hold_is_not_trained_and_where_it_was_it_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mixtral's class has no place for biases: by default a loss balances, and what is exported is what was trained."""
    plain = {name: value for name, value in EXPERTS.items() if name != "balance_rate"}
    short = {"train.steps": 4, "model.family": "mixtral"}
    by_loss = train_on(make_run(data, name="loss", **short, **{"model.experts": plain}), tmp_path, 1)
    by_bias = train_on(make_run(data, name="bias", **short, **{"model.experts": EXPERTS}), tmp_path, 1)
    assert not any(bias.any() for bias in biases_of(by_loss).values())
    export = ["checkpoint", "export", "--tokenizer", "none", "--workspace", str(tmp_path)]
    assert main([*export, "loss", str(tmp_path / "loss")]) == 0
    found = newest(by_loss.checkpoints)
    assert found is not None
    run = load(by_loss.spec_file).run
    assert run.model.experts is not None
    assert (run.model.experts.balance_rate, run.model.experts.balance_loss) == (0.0, 0.01)
    ours = Decoder(shape_of(run.model))
    load_weights(ours, str(by_loss.path))
    tokens = torch.arange(60)[None] % 96
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), logits(opened(tmp_path / "loss"), tokens), rtol=0, atol=1e-5)

    capsys.readouterr()
    assert main([*export, "bias", str(tmp_path / "bias")]) == 2
    said = capsys.readouterr().err
    assert "has no place for the biases" in said
    assert "--drop-biases" in said
    assert not (tmp_path / "bias").exists()
    assert main([*export, "--drop-biases", "bias", str(tmp_path / "bias")]) == 0
    assert biases_of(by_bias)  # the run keeps them


def test_muon_orthogonalises_each_expert_and_not_their_stack() -> None:
    stack = (
        torch.randn(3, 10, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 9.0, 0.1])[:, None, None]
    )
    found = orthogonalise(stack)
    for matrix, one in zip(stack, found, strict=True):
        torch.testing.assert_close(one, orthogonalise(matrix), rtol=1e-4, atol=1e-5)
    assert torch.linalg.matrix_norm(found, 2).max() < 1.3


@pytest.mark.slow
def test_muon_moves_a_stack_the_same_however_it_is_cut() -> None:
    whole, slope = (torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def moved(p: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        p.grad = grad
        muon = Muon([p], lr=0.1, momentum=0.9, weight_decay=0.1)
        muon.state[p]["momentum"] = torch.zeros_like(p)
        muon.step()
        return p.detach()

    expected = moved(torch.nn.Parameter(whole.clone()), slope)

    def work(rank: int, world: int) -> list[float]:
        flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
        cuts = [(flat, [Shard(0)]), (flat, [Shard(1)])]
        cuts += [(square, [Shard(1), Shard(0)]), (square, [Replicate(), Shard(2)])]
        found = [
            moved(torch.nn.Parameter(distribute_tensor(whole, *cut)), distribute_tensor(slope, *cut)) for cut in cuts
        ]
        # Expert-parallel over one axis and FSDP over the other, both along the experts: a strided shard.
        module = torch.nn.Module()
        module.stack = torch.nn.Parameter(distribute_tensor(whole, square["ep"], [Shard(0)]))
        fully_shard(module, mesh=square["shard"])
        grad = torch.zeros_like(module.stack)
        mine = square["ep"].get_local_rank() * 2 + square["shard"].get_local_rank()  # of four experts
        grad.to_local().copy_(slope[mine : mine + 1])
        found.append(moved(module.stack, grad))
        return [(t.full_tensor() - expected).abs().max().item() for t in found]

    for differences in run_ranks(work, 4):
        assert len(differences) == 5
        assert max(differences) < 1e-5
