"""A run moves from any mesh to any other and back: parameters and optimizer state, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import checkpoint
from shoal.checkpoint.layout import local_of
from shoal.decide.auto import decide
from shoal.parallel.build import build
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place, join
from shoal.spec.run import Run
from shoal.train.optim import Optimizers
from shoal.train.state import State
from tests.ranks import run_ranks
from tests.train.matrix import MODELS, Case, case
from tests.train.tiny import make_data, make_run

pytestmark = pytest.mark.usefixtures("kept_ranks")

ONE = case()
DENSE = [
    ONE,
    case(dp_replicate=2),
    case(dp_shard=2),
    case(tp=2),
    case(pp=2, schedule="zbv", micro_batch=2),
    case(cp=2, cp_method="ring"),
    case(dp_shard=2, tp=2),
    case(pp=2, dp_shard=2, schedule="interleaved", micro_batch=2),
    case(pp=2, dp_shard=2, tp=2, schedule="1f1b", micro_batch=2),
]
SPARSE = [
    case("mixture"),
    case("mixture", dp_shard=2, ep=2),
    case("mixture", tp=2, dp_shard=2, ep=4),
    case("mixture", pp=2, dp_shard=2, tp=2, ep=2, schedule="zbv", micro_batch=2),
]
QUICK = [DENSE[0], DENSE[2], DENSE[4], DENSE[6]]


def pairs_of(meshes: list[Case]) -> int:
    """Every ordered pair of different meshes."""
    return len(list(itertools.permutations(meshes, 2)))


def run_on(mesh: Case, workspace: Path) -> Run:
    changes: dict[str, Any] = {f"model.{k}": v for k, v in MODELS[mesh.model].items()} | {"model.vocab_size": 96}
    changes |= {f"mesh.{k}": v for k, v in mesh.mesh.items()} | {"train.batch": 16, "mesh.micro_batch": 2}
    return decide(make_run(workspace / "data", **changes), workspace, mesh.processes).run


def state_on(run: Run, place: Place) -> State:
    model: Laid = build(run, place)
    return State(run, model, Optimizers(run.train.optimizer, model.named_parameters()), [], {})


def moves(meshes: list[Case], folder: Path, origin: Path) -> list[str]:
    """Saves what `origin` holds from every mesh, loads each of these on every other; what was not equal to the bit."""
    wrong: list[str] = []

    def on_one(mesh: Case, work: Any) -> None:
        run = run_on(mesh, folder)
        said = run_ranks(lambda r, w: work(state_on(run, join(run))), mesh.processes)
        wrong.extend(itertools.chain.from_iterable(said))

    def home(mesh: Case) -> Path:
        return folder / f"from-{meshes.index(mesh)}"

    for mesh in meshes:

        def take_along(state: State, mesh: Case = mesh) -> list[str]:
            checkpoint.restore(origin, state.tensors())
            checkpoint.save(home(mesh), 1, state.tensors(), {}, holders=state.holders(), piece_bytes=512)
            return []

        on_one(mesh, take_along)
    for mesh in meshes:

        def compare(state: State, mesh: Case = mesh) -> list[str]:
            tensors, found = state.tensors(), []
            checkpoint.restore(origin, tensors)
            right = {name: local_of(t).clone() for name, t in tensors.items()}
            for other in meshes:
                for t in tensors.values():
                    local_of(t).fill_(float("nan"))
                checkpoint.restore(home(other), tensors)
                bad = [n for n, t in tensors.items() if not torch.equal(local_of(t), right[n])]
                found += [f"{other.name} → {mesh.name}: {name}" for name in bad]
            return found

        on_one(mesh, compare)
    return wrong


def origin_of(mesh: Case, folder: Path) -> Path:
    """A checkpoint of one process whose every number is another: parameters, and both moments of AdamW."""
    run = run_on(mesh, folder)

    def work(rank: int, world: int) -> int:
        state = state_on(run, join(run))
        tensors = state.tensors()
        for t in tensors.values():
            t.copy_(torch.randn(t.shape))
        checkpoint.save(folder / "origin", 1, tensors, {})
        return sum(name.endswith(("exp_avg", "exp_avg_sq")) for name in tensors)

    assert run_ranks(work, 1)[0] > 20, "the optimizer's state is part of it"
    return folder / "origin"


def prepared(folder: Path) -> Path:
    make_data(folder / "data")
    return folder


@pytest.mark.slow
def test_twelve_pairs_of_meshes_are_bitwise_the_same(tmp_path: Path) -> None:
    assert pairs_of(QUICK) == 12
    folder = prepared(tmp_path)
    assert moves(QUICK, folder, origin_of(ONE, folder)) == []


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [DENSE, SPARSE], ids=["dense", "experts"])
def test_every_pair_of_meshes_is_bitwise_the_same(meshes: list[Case], tmp_path: Path) -> None:
    assert pairs_of(DENSE) + pairs_of(SPARSE) == 84
    folder = prepared(tmp_path)
    assert moves(meshes, folder, origin_of(meshes[0], folder)) == []
