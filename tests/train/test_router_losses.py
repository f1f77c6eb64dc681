"""What is held against a router besides the model's loss is a mean over the tokens that count: the same however many of
them are targets, and however the batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.windows import NO_TARGET, PADDING, Batch
from shoal.journal.rundir import RunDir
from shoal.model.loads import sparse_layers
from shoal.parallel.build import build
from shoal.parallel.place import Place, lay_out
from shoal.spec.mesh import Sizes
from shoal.spec.run import Run
from shoal.swarm.trainer import worker
from shoal.swarm.trainer.mesh import Mesh
from shoal.train.amount import Amount, amount
from shoal.train.parts import prepare
from tests.plan.runs import closed
from tests.ranks import run_ranks
from tests.train.tiny import make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

ROWS, SEQ, VOCAB = 8, 16, 64
MODEL: dict[str, Any] = {
    "family": "qwen3_moe", "qk_norm": True, "vocab_size": VOCAB, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2,
    "experts": {"count": 4, "top_k": 2, "ffn_dim": 16, "z_loss": 1.0, "balance_loss": 1.0},
}  # fmt: skip
MESHES = {"dp_shard": 2, "dp_replicate": 2, "tp": 2, "pp": 2, "cp": 2, "ep": 2}


def a_run(micro_batch: int = 2, **mesh: int) -> Run:
    if "ep" in mesh:
        mesh["dp_shard"] = 2
    cut = {f"mesh.{axis}": size for axis, size in (mesh | {"micro_batch": micro_batch}).items()}
    return closed(MODEL, **cut, **{"train.batch": ROWS, "data.seq_len": SEQ})


def a_batch(targets: float, padded: bool = False) -> Batch:
    """With this share of its tokens as targets; padded, the last few of each row are none of its tokens."""
    rng = np.random.default_rng(1)
    tokens, chance = rng.integers(0, VOCAB, (ROWS, SEQ)), rng.random((ROWS, SEQ))
    positions = np.broadcast_to(np.arange(SEQ), tokens.shape).copy()
    fills = positions >= SEQ - 1 - np.arange(ROWS)[:, None] if padded else np.zeros_like(positions, bool)
    wanted = np.where((chance < targets) & ~fills, np.roll(tokens, -1, 1), NO_TARGET)
    return Batch(tokens, wanted, positions, np.where(fills, PADDING, 0).astype(np.int32))


def pull(run: Run, place: Place, whole: Batch) -> float:
    """The norm of the gradient that routers' own losses give all parameters, in one step: the model's loss is silenced
    by a head of zeros."""
    model, micro = build(run, place), int(run.mesh.micro_batch)
    share = ROWS // place.sizes.dp
    rows = range(place.at["dp"] * share, (place.at["dp"] + 1) * share, micro)
    arrays = (whole.tokens, whole.targets, whole.positions, whole.documents)
    batches = [Batch(*(a[i : i + micro] for a in arrays)) for i in rows]
    for name, p in model.named_parameters():
        if name.startswith("head"):
            p.detach().zero_()
    for place_of, layer in sparse_layers(model.decoders):
        layer.excess.copy_(torch.linspace(-0.5, 0.5, 4) * (1 + place_of))
    known = Amount(*place.sum_of_batch(*amount(model, batches)))
    model.backward(batches, token_weight=known.token_weight)
    for name, p in model.named_parameters():
        if name.startswith("head") and p.grad is not None:
            p.grad.zero_()
    return float(model.norm(1 / known.targets, None)[0])


ALONE = Place(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("padded", [False, True])
def test_it_is_the_same_with_a_tenth_of_the_tokens_as_targets_and_however_they_are_cut(padded: bool) -> None:
    wanted = pull(a_run(8), ALONE, a_batch(1.0, padded))
    assert wanted > 0.1
    assert pull(a_run(8), ALONE, a_batch(0.1, padded)) == pytest.approx(wanted, rel=1e-5)
    assert pull(a_run(2), ALONE, a_batch(0.1, padded)) == pytest.approx(wanted, rel=1e-5)
    assert pull(a_run(8), ALONE, a_batch(0.1, not padded)) != pytest.approx(wanted, rel=1e-2)  # padding counts nowhere

    def work(rank: int, world: int) -> dict[str, float]:
        found = {}
        for axis, size in MESHES.items():
            run = a_run(**{axis: size})
            place = lay_out(rank, world, torch.device("cpu"), Sizes.of(run.mesh), experts=True)
            found[axis] = pull(run, place, a_batch(0.1, padded))
        return found

    for found in run_ranks(work, 2):
        assert found == pytest.approx(dict.fromkeys(MESHES, wanted), rel=1e-5)


def in_the_loop(run: Run, folder: Path) -> tuple[int, float]:
    (step,) = steps_of(train_on(run, folder, 1))
    return step["targets"], step["grad_norm"]


def in_a_swarm(run: Run, folder: Path) -> tuple[int, float]:
    run = worker.closed(run, folder, 1)
    run_dir = RunDir.of(run.name, folder)
    mesh = Mesh(run, run_dir, prepare(run_dir, run, ALONE), None)
    step = mesh.step([[0, 16]], [], 1.0)
    mesh.leave()
    return step.targets, step.grad_norm


@pytest.mark.parametrize("step", [in_the_loop, in_a_swarm])
def test_a_step_of_a_run_pulls_as_hard_where_masks_hide_most_targets(
    step: Callable[[Run, Path], tuple[int, float]], tmp_path: Path
) -> None:
    """In one step of a real driver, where the z-loss outweighs all else, masks change next to nothing."""
    big = {"count": 4, "top_k": 2, "ffn_dim": 16, "z_loss": 1e4}
    changes = {"train.steps": 1, "model.family": "mixtral", "model.init": "zero", "model.experts": big, "mesh.pp": 1}
    found = []
    for name, hidden in (("all", 0.0), ("few", 0.9)):
        data = make_data(tmp_path / name, masked=True, hidden=hidden)
        found.append(step(make_run(data, name=name, **changes), tmp_path))
    (many, whole), (few, hidden_most) = found
    assert few < 0.2 * many
    assert hidden_most == pytest.approx(whole, rel=1e-3)
