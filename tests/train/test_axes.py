"""What holds on one process holds on every mesh: bitwise resumption, evaluation, moving, given weights, bf16."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import checkpoint
from shoal.decide.auto import decide
from shoal.errors import Stopped
from shoal.generate.engine import Engine
from shoal.generate.request import Sampling
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.model.decoder import Decoder
from shoal.model.hf import save_folder
from shoal.parallel.place import join
from shoal.spec import dump
from shoal.spec.mesh import Sizes
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.train.worker import work
from tests.ranks import run_ranks
from tests.train.matrix import MODELS
from tests.train.test_resume import train_and_die
from tests.train.tiny import digest_of, losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

STEPS = 8
ALONE: dict[str, Any] = {}
ZBV = {"pp": 2, "tp": 2, "schedule": "zbv", "micro_batch": 2}
VEE = {"pp": 2, "schedule": "zbv", "micro_batch": 2}
PIPE = {"pp": 2, "dp_shard": 2, "schedule": "1f1b", "micro_batch": 2}
GRID = {"dp_shard": 2, "tp": 2}
ROWS = {"tp": 2}
DEALT = {"dp_shard": 2, "ep": 2}
RING = {"cp": 2, "cp_method": "ring"}
EXPERTS = {"dp_shard": 2, "tp": 2, "ep": 4}


def run_of(data: Path, name: str, model: str, mesh: dict[str, Any], **changes: Any) -> tuple[Run, int]:
    sizes = {axis: mesh.get(axis, 1) for axis in Sizes.__dataclass_fields__}
    fixed = {"name": name, "model": MODELS[model], "train.steps": STEPS, "checkpoint.every": 3}
    run = make_run(data, **{**fixed, **{f"mesh.{k}": v for k, v in {**sizes, **mesh}.items()}, **changes})
    return run, Sizes(**sizes).world


@pytest.mark.slow
def test_killed_and_resumed_on_a_mesh_of_several_axes_every_bit_is_the_same(tmp_path: Path) -> None:
    data, held_out = make_data(tmp_path / "data"), make_data(tmp_path / "held-out", documents=30, seed=5)
    evaluation = {"data.eval": str(held_out), "eval.every": 2}
    for model, mesh in (("qwen3 tied", VEE), ("qwen3 tied", PIPE), ("mixture", EXPERTS)):
        key = "".join(mesh)
        run, world = run_of(data, f"whole{key}", model, mesh, **evaluation)
        whole = train_on(run, tmp_path, world)
        run, world = run_of(data, f"killed{key}", model, mesh, **evaluation)
        train_and_die(run, tmp_path, world, 5, victim=world - 1)
        resumed = train_on(run, tmp_path, world)
        assert digest_of(resumed) == digest_of(whole), (model, mesh)


@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        pytest.param("qwen3 tied", [ALONE, VEE, ROWS, RING, PIPE], marks=pytest.mark.slow),
        ("mixture", [DEALT, VEE, ALONE, PIPE]),
    ],
)
def test_a_run_moves_from_mesh_to_mesh_and_stays_on_its_curve(
    model: str, meshes: list[dict[str, Any]], tmp_path: Path
) -> None:
    data, held_out = make_data(tmp_path / "data"), make_data(tmp_path / "held-out", documents=30, seed=5)
    evaluation = {"data.eval": str(held_out), "eval.every": 1}
    whole = train_on(run_of(data, "whole", model, ALONE, **evaluation)[0], tmp_path, 1)
    ends = [*range(1, len(meshes)), STEPS]
    for mesh, (begin, end) in zip(meshes, pairwise([0, *ends]), strict=True):
        run, world = run_of(data, "moving", model, mesh, **evaluation)
        moving = leg(run, tmp_path, world, end - begin if end < STEPS else None)
    assert len(steps_of(moving)) == STEPS  # no step was taken twice
    assert np.max(np.abs(losses_of(moving) / losses_of(whole) - 1)) < 2e-5
    held = [np.array([r["loss"] for r in records(d.journal_file) if r["kind"] == "eval"]) for d in (moving, whole)]
    assert len(held[0]) == len(held[1]) == STEPS
    assert np.max(np.abs(held[0] / held[1] - 1)) < 2e-5


def leg(run: Run, workspace: Path, world: int, steps: int | None) -> RunDir:
    """Takes some steps and is told to stop; all that are left when `steps` is None."""
    if steps is None:
        return train_on(run, workspace, world)
    decided = decide(run, workspace, world).run
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.spec_file.write_text(dump(decided))

    def rank(rank: int, world: int) -> None:
        with pytest.raises(Stopped, match="stopped after step"):
            work(run_dir, decided, join(decided), told_after(steps))

    run_ranks(rank, world, timeout_s=120)
    return run_dir


def told_after(steps: int) -> Callable[[], bool]:
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return asked > steps

    return ask


def test_a_mesh_starts_from_hugging_face_weights_as_one_process_does(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    shape = shape_of(decide(run_of(data, "shape", "mixture", ALONE)[0], tmp_path, 1).run.model)
    decoder = Decoder(shape)
    decoder.init_weights(seed=7)
    save_folder(tmp_path / "weights", shape, decoder.state_dict())
    first = {}
    laid: dict[str, dict[str, Any]] = {"alone": ALONE, "rows": {**ROWS, "ep": 2}, "stages": VEE}
    for name, mesh in laid.items():
        run, world = run_of(data, name, "mixture", mesh, **{"train.steps": 2, "train.schedule.warmup_steps": 1})
        model = {**MODELS["mixture"], "vocab_size": shape.vocab_size, "weights": str(tmp_path / "weights")}
        run = Run.model_validate({**run.model_dump(), "model": model})
        first[name] = losses_of(train_on(run, tmp_path, world))
    other, _ = run_of(data, "other", "mixture", ALONE, **{"train.steps": 2, "train.schedule.warmup_steps": 1})
    for name in laid:
        assert np.max(np.abs(first[name] / first["alone"] - 1)) < 2e-5, name
    assert abs(losses_of(train_on(other, tmp_path, 1))[0] - first["alone"][0]) > 1e-4  # the weights were the folder's


@pytest.mark.slow
def test_what_a_mesh_trained_is_sampled_on_one_process(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    texts = []
    for name, mesh in (("alone", ALONE), ("mesh", {**ZBV, "ep": 2})):
        run, world = run_of(data, name, "mixture", mesh, **{"train.steps": 4})
        found = checkpoint.newest(train_on(run, tmp_path, world).checkpoints)
        assert found is not None
        decoder = Decoder(shape_of(decide(run, tmp_path, world).run.model)).eval()
        decoder.load_state_dict(checkpoint.read_full(found))
        engine = Engine(decoder, vocab_size=decoder.shape.vocab_size)
        engine.submit([1, 2, 3], Sampling(max_tokens=20, temperature=0))
        texts.append([event.token for event in engine.run()])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3 tied", "mixture"])
def test_bf16_follows_float32_on_every_axis(model: str, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    few = {"train.steps": 4}
    whole = losses_of(train_on(run_of(data, "float32", model, ALONE, **few)[0], tmp_path, 1))
    meshes = [GRID, {**RING, "recompute": "full"}]
    if model == "mixture":
        meshes = [EXPERTS, {"pp": 2, "dp_shard": 2, "ep": 2, "micro_batch": 2}]
    for i, mesh in enumerate(meshes):
        run, world = run_of(data, f"bf16-{i}", model, mesh, **few, **{"train.precision": "bf16"})
        losses = losses_of(train_on(run, tmp_path, world))
        assert 0 < np.max(np.abs(losses / whole - 1)) < 5e-3, mesh  # not float32 in disguise, and close to it
