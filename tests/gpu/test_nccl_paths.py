"""The ways in which a run of several ranks is used, over NCCL: evaluated, moved to another mesh, started by torchrun,
profiled; and the collectives that `shoal bench` measures. A part of `make test-gpu` (tests/gpu/suite.py).

All commands are as a person gives them, beside each other, in float32: the curves are compared within its bars.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.shared_gpu import SETTING
from tests.gpu.crew import Crew, Task
from tests.gpu.here import DEVICE, needs_device
from tests.train.matrix import FLOAT32, WIDTHS
from tests.train.tiny import losses_of, make_data

pytestmark = needs_device

STEPS, HALF = 8, 4
# A constant rate: a run of four steps takes the first four of a run of eight.
RUN_FILE = f"""
name: any
model: {{{", ".join(f"{k}: {v}" for k, v in WIDTHS.items())}, layers: 4, init: normal}}
data: {{train: data, eval: held-out, seq_len: 32}}
train: {{steps: {STEPS}, batch: 16, precision: fp32, compile: false, optimizer: {{lr: 3e-3}},
  schedule: {{warmup_steps: 0, name: constant}}}}
eval: {{every: {HALF}}}
mesh: {{micro_batch: 4, dp_replicate: 1, dp_shard: 1, tp: 1, pp: 1, cp: 1, ep: 1}}
resources: {{processes: 1, device: {DEVICE}, threads: 1}}
track: {{mlflow: false}}
"""
MIXTURE = ["model.family=qwen3_moe", "model.qk_norm=true", "model.experts={count: 4, top_k: 2, ffn_dim: 32}"]
MESHES = {
    "dp_shard 2": ["mesh.dp_shard=2", "resources.processes=2"],
    "tp 2": ["mesh.tp=2", "resources.processes=2"],
    "pp 2": ["mesh.pp=2", "mesh.schedule=1f1b", "resources.processes=2"],
    "dp_shard 2 x tp 2": ["mesh.dp_shard=2", "mesh.tp=2", "resources.processes=4"],
    "ep 2": ["mesh.dp_shard=2", "mesh.ep=2", "resources.processes=2"],
    "one": [],
}
BACK = ["mesh.dp_shard=1", "mesh.tp=1", "mesh.pp=1", "mesh.ep=1", "mesh.schedule=auto", "resources.processes=1"]
MOVES = [("dp_shard 2", "tp 2"), ("dp_shard 2 x tp 2", "pp 2"), ("pp 2", "one"), ("ep 2", "one")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal.train"]
SHOAL = [sys.executable, "-m", "shoal"]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, crew: Crew) -> Path:
    """Everything has begun."""
    folder = tmp_path_factory.mktemp("paths")
    make_data(folder / "data", documents=240)
    make_data(folder / "held-out", documents=60, seed=1)
    (folder / "run.yaml").write_text(RUN_FILE)

    def start(name: str, ranks: int, *commands: list[str]) -> None:
        chain = " && ".join(shlex.join(command) for command in commands)
        crew.add(Task(name, [(["sh", "-c", chain], {SETTING: "1"})], ranks, 100, folder))

    profiled = ["run.yaml", *MESHES["dp_shard 2"], "--steps", "2", "--warmup", "3", "--json"]
    start("profile", 2, [*SHOAL, "profile", *profiled, "--out", "profiled"])
    benched = ["--device", DEVICE, "--processes", "2", "--seconds", "6", "--quick", "--json"]
    start("bench", 2, [*SHOAL, "bench", *benched, "--out", "bench.toml"])
    start("evaluated", 4, train("evaluated", "dp_shard 2 x tp 2"))
    start("alone", 1, train("alone", "one"))
    start("alone-experts", 1, train("alone-experts", "one", *MIXTURE))
    start("torchrun", 2, [*TORCHRUN, "run.yaml", "name=torchrun", *MESHES["dp_shard 2"]])
    for origin, goal in MOVES:
        name, more = moved(origin, goal), MIXTURE if origin == "ep 2" else []
        on = [*SHOAL, "resume", name, f"train.steps={STEPS}", *BACK, *MESHES[goal]]
        start(name, 4 if "x" in name else 2, train(name, origin, f"train.steps={HALF}", *more), on)
    return folder


def train(name: str, mesh: str, *more: str) -> list[str]:
    return [*SHOAL, "train", "run.yaml", f"name={name}", *MESHES[mesh], *more]


def moved(origin: str, goal: str) -> str:
    return f"from-{origin}-to-{goal}".replace(" ", "-")


def off(folder: Path, name: str, alone: str = "alone") -> float:
    """The largest relative difference between two curves."""
    one, other = (losses_of(RunDir.of(n, folder)) for n in (alone, name))
    assert len(one) == len(other) == STEPS
    return float(np.max(np.abs(other / one - 1)))


def evals(folder: Path, name: str) -> list[float]:
    return [float(r["loss"]) for r in journal.records(RunDir.of(name, folder).journal_file) if r["kind"] == "eval"]


def test_evaluation_on_a_mesh_is_that_of_one_process(
    folder: Path, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    crew.done("alone")
    crew.done("evaluated")
    one, mesh = (np.array(evals(folder, name)) for name in ("alone", "evaluated"))
    assert len(one) == len(mesh) == 2
    record_property("told", f"largest relative difference {np.max(np.abs(mesh / one - 1)):.1e}")
    assert np.max(np.abs(mesh / one - 1)) <= FLOAT32.loss
    assert off(folder, "evaluated") <= FLOAT32.loss


@pytest.mark.parametrize(("origin", "goal"), MOVES)
def test_saved_on_one_mesh_it_goes_on_on_another(
    folder: Path, crew: Crew, origin: str, goal: str, record_property: pytest.RecordProperty
) -> None:
    name, alone = moved(origin, goal), "alone-experts" if origin == "ep 2" else "alone"
    crew.done(alone)
    crew.done(name)
    starts = [r for r in journal.records(RunDir.of(name, folder).journal_file) if r["kind"] == "start"]
    assert [r["step"] for r in starts] == [0, HALF]
    record_property("told", f"loss {off(folder, name, alone):.1e}")
    assert off(folder, name, alone) <= FLOAT32.loss


def test_torchrun_trains_the_same_curve(folder: Path, crew: Crew, record_property: pytest.RecordProperty) -> None:
    crew.done("alone")
    crew.done("torchrun")
    record_property("told", f"loss {off(folder, 'torchrun'):.1e}")
    assert off(folder, "torchrun") <= FLOAT32.loss


def test_a_profile_of_two_ranks_accounts_for_their_time(
    folder: Path, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    told = json.loads(crew.done("profile"))
    assert len(told["ranks"]) == 2
    sent = [rank["kinds"]["communication"]["seconds"] + rank["hidden_communication_s"] for rank in told["ranks"]]
    record_property("told", f"accounted for {told['accounted']:.0%}")
    assert min(sent) > 0
    assert told["accounted"] >= 0.9


def test_bench_measures_the_collectives_and_keeps_no_speed_of_a_shared_gpu(
    folder: Path, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    told = json.loads(crew.done("bench"))
    rows = told["measured"]["collectives"]
    record_property("told", f"{len(rows)} rows")
    assert {row[0] for row in rows} == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert all(row[1] == 2 and row[3] > 0 for row in rows)
