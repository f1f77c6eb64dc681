"""The kinds of `hf_kinds` on several layouts: losses, every parameter's gradient norm, and what is truly cut."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from shoal.data.shards import TokenShards
from shoal.data.windows import Windows
from shoal.decide.auto import decide
from shoal.errors import SpecError
from shoal.model.hf_any import save_folder
from shoal.parallel.build import build
from shoal.parallel.laid import Chosen, Laid
from shoal.parallel.place import Place, join
from shoal.spec import load
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.train.optim import Optimizers
from tests.ranks import run_ranks

ROWS, STEPS = 8, 3
LAYOUTS = {
    "1": (1, {}),
    "dp_shard 2": (2, {"dp_shard": 2}),
    "dp_replicate 2": (2, {"dp_replicate": 2}),
    "dp_shard 4": (4, {"dp_shard": 4}),
    "tp 2": (2, {"tp": 2}),
    "tp 2 x dp_shard 2": (4, {"tp": 2, "dp_shard": 2}),
    "tp 2 x dp_replicate 2": (4, {"tp": 2, "dp_replicate": 2}),
}
ROUNDING = 1e-4  # of the largest gradient norm: what is below (a key's bias) is compared with this much


@dataclass(frozen=True)
class Cut:
    """Over one axis."""

    parameters: int
    share: float  # of the bytes


@dataclass(frozen=True)
class Measured:
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, float]]  # by parameter
    parameters: int
    by_dp_shard: Cut
    by_tp: Cut
    chosen: tuple[Chosen, ...]


@dataclass(frozen=True)
class Apart:
    """The largest relative differences from another."""

    loss: float
    norm: float
    gradient: float
    worst: str  # the parameter of that gradient


def asked(folder: Path, kind: str, name: str = "any", *over: str, apart: bool = False) -> Run:
    file = folder / f"{name}.yaml"
    file.write_text(
        f"name: {name}\nmodel: {{hf: {kind}}}\n"
        f"data: {{train: data, seq_len: 16, mask_documents: {str(apart).lower()}}}\n"
        f"train: {{steps: 4, batch: {ROWS}, precision: fp32, optimizer: {{lr: 3.0e-3}}}}\n"
        "checkpoint: {every: 0, background: false}\ntrack: {mlflow: false}\nresources: {device: cpu, threads: 1}\n"
    )
    return load(file, over).run


@cache
def found(folder: Path, layout: str, kinds: tuple[str, ...], *over: str) -> dict[str, Measured | str]:
    """Of every kind; what refuses it, where it is refused. One group for all of them."""
    world, mesh = LAYOUTS[layout]
    meshed = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    runs = {kind: decide(asked(folder, kind, "any", *meshed, *over), folder, world).run for kind in kinds}

    def rank(rank: int, world: int) -> dict[str, Measured | str]:
        return {kind: _one(run, folder) for kind, run in runs.items()}

    return run_ranks(rank, world, timeout_s=500)[0]


def _one(run: Run, folder: Path) -> Measured | str:
    place = join(run)
    try:
        model = build(run, place)
    except SpecError as e:
        return str(e)
    return trained(run, place, model, folder)


def trained(run: Run, place: Place, model: Laid, folder: Path) -> Measured:
    windows = Windows.of([TokenShards.open(folder / "data")], run.data)
    optimizers = Optimizers(run.train.optimizer, model.named_parameters())
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        mine = range(step * ROWS + place.at["dp"], (step + 1) * ROWS, place.sizes.dp)
        batch = windows.batch([0] * len(mine), list(mine))
        loss = model.backward([batch])
        targets = place.sum_of_batch(float(batch.target_count))[0]
        gradients.append(model.gradient_norms())
        norm, factor = model.norm(1 / targets, 1.0)
        optimizers.step(1.0, factor)
        losses.append(float(model.total(loss)) / targets)
        norms.append(float(norm))
    named = dict(model.named_parameters())
    return Measured(losses, norms, gradients, len(named), cut(model, "shard"), cut(model, "tp"), model.chosen)


def cut(model: Laid, axis: str) -> Cut:
    """Counted on the tensors themselves: what this process holds less of, and not what was asked for."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    mine = [name for name, p in model.named_parameters() if _is_cut(p, axis)]
    return Cut(len(mine), sum(sizes[name] for name in mine) / sum(sizes.values()))


def _is_cut(p: object, axis: str) -> bool:
    if not isinstance(p, DTensor):
        return False
    names = p.device_mesh.mesh_dim_names or ()
    over = names.index(axis) if axis in names else None
    if over is None or p.device_mesh.size(over) == 1 or p.placements[over].is_replicate():
        return False
    alone = p.shape[p.placements[over].dim] == 1  # of one row, which one process has and no other
    return alone or p.to_local().numel() < p.numel()


def apart(one: Measured, other: Measured) -> Apart:
    worst = max(
        (abs(mine[name] - theirs[name]) / max(mine[name], ROUNDING * max(mine.values())), name)
        for mine, theirs in zip(one.gradients, other.gradients, strict=True)
        for name in mine
    )
    return Apart(_most(one.losses, other.losses), _most(one.norms, other.norms), *worst)


@cache
def exported(folder: Path, layout: str, kinds: tuple[str, ...]) -> dict[str, bool]:
    """Whether what transformers reads of an export is to the bit what was learnt on the layout."""
    world, mesh = LAYOUTS[layout]
    meshed = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    runs = {kind: decide(asked(folder, kind, "any", *meshed), folder, world).run for kind in kinds}

    def rank(rank: int, world: int) -> dict[str, bool]:
        return {kind: _exports(run, folder) for kind, run in runs.items()}

    return run_ranks(rank, world, timeout_s=500)[0]


def _exports(run: Run, folder: Path) -> bool:
    from transformers import AutoModelForCausalLM

    place = join(run)
    model = build(run, place)
    trained(run, place, model, folder)
    saved = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.saved().items()}
    if place.rank != 0:
        return True
    with tempfile.TemporaryDirectory() as at:
        save_folder(Path(at) / "out", run, shape_of(run.model), saved, None, None, None)
        read = dict(AutoModelForCausalLM.from_pretrained(Path(at) / "out").named_parameters())
    return read.keys() == {n.removeprefix("net.") for n, _ in model.named_parameters()} and all(
        torch.equal(p, saved[f"net.{name}"]) for name, p in read.items()
    )


def _most(mine: Iterable[float], theirs: Iterable[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(mine, theirs, strict=True))
