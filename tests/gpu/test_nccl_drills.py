"""Every drill of `shoal drill` over NCCL: ranks are killed, stopped, starved, and the run ends as if nobody had.

On a GPU `shoal drill` itself only tells whether the digest is the same; here it has to be, as nothing in this model
adds up in an order of its own. A part of `make test-gpu` (tests/gpu/suite.py), once with MPS and once without.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.drill.plan import SCENARIOS
from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.shared_gpu import SETTING
from tests.gpu.crew import Crew, Failed, Task
from tests.gpu.here import DEVICE, needs_device
from tests.train.tiny import make_data

pytestmark = needs_device

BATCH = 32
RUN_FILE = f"""
name: any
model: {{dim: 128, layers: 2, heads: 4, kv_heads: 2, ffn_dim: 256}}
data: {{train: data, seq_len: 128}}
train: {{steps: 56, batch: {BATCH}, compile: false, optimizer: {{lr: 1e-3}}, schedule: {{warmup_steps: 3}}}}
mesh: {{micro_batch: 4, dp_shard: 2}}
resources: {{processes: 2, device: {DEVICE}, threads: 1}}
checkpoint: {{every: 5, keep: 3}}
guard: {{backoff_s: 0.1}}
track: {{mlflow: false}}
"""
# A drill with several faults costs one start; those of a group come one after the other, the groups beside each other.
GROUPS = {
    "restarts": ["kill", "bitflip", "oom", "disk-full"],
    "waits": ["stop", "preempt", "coordinator", "slow"],
    "poison": ["nan"],
}
ISLANDS = ["kill", "stop", "partition", "preempt", "coordinator"]
# Islands go on while one starts again: steps are so slow that the next fault finds it back.
APART = ["fleet.islands=2", "fleet.deterministic=true", "fleet.shards=4", "train.steps=90"]
LIMIT_S = 200
_SHOWN = ("step", "island", "rank", "cause", "evidence", "members", "left", "joined")
# A client of MPS that is killed while it computes may take others of its server with it, as NVIDIA says; islands on
# cards of their own do not share that fate.
NOT_OURS = ("CUDA error", "SIGABRT")
ISLANDS_S = 280  # two runs, one after the other, and five starts in the second; under MPS a start takes 17 s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, crew: Crew) -> Path:
    """The run that nobody breaks is on its way, and so are the islands, whose drill has a calm run of its own."""
    folder = tmp_path_factory.mktemp("drills")
    make_data(folder / "data", documents=2000)
    (folder / "run.yaml").write_text(RUN_FILE)
    calm = [sys.executable, "-m", "shoal", "train", "run.yaml", "name=calm"]
    crew.add(_task("calm", calm, 2, folder, 90))
    crew.add(_task("islands", _drill("islands", ISLANDS, "0.6", *APART), 4, folder, ISLANDS_S))
    return folder


@pytest.fixture(scope="module")
def drilled(folder: Path, crew: Crew) -> Path:
    """Every drill of a run without islands is on its way."""
    crew.done("calm")
    for group, kinds in GROUPS.items():
        crew.add(_task(group, _drill(group, kinds, "0.1", "--baseline", "runs/calm"), 2, folder, LIMIT_S))
    return folder


def _task(name: str, command: list[str], ranks: int, folder: Path, limit_s: float) -> Task:
    return Task(name, [(command, {SETTING: "1"})], ranks, limit_s, folder)


def _drill(name: str, kinds: list[str], pace: str, *more: str) -> list[str]:
    asked = ["--scenario", ",".join(kinds), "--pause", "8", "--pace", pace, "--patience", "60", "--json"]
    return [sys.executable, "-m", "shoal", "drill", "run.yaml", *asked, "--keep", f"kept-{name}", *more]


def found(crew: Crew, folder: Path, group: str) -> dict[str, Any]:
    """What the drill told; one that failed says why by itself, and its runs say more."""
    try:
        return json.loads(crew.done(group))
    except Failed as e:
        out = folder.parent  # the JSON stands in the log even then
        said = next(iter(out.glob(f"logs*/{group}-0.out")), None)
        told = json.loads(text) if said and (text := said.read_text().strip()).startswith("{") else None
        if told is None:
            raise
        last = "".join(f"; the last failure: {words}" for words in failures(folder, group)[-1:])
        done = [fault["kind"] for fault in told["faults"]]
        raise Failed(f"{told['how'] or 'the drill did not pass'}; faults done: {done}{last}\n{e}") from None


def failures(folder: Path, group: str) -> list[str]:
    """What the supervisor saw in the drill, in order."""
    file = RunDir.of("drill", folder / f"kept-{group}").journal_file
    found = [r for r in journal.records(file) if r["kind"] in ("failure", "epoch")] if file.exists() else []
    return [
        f"{r['kind']}: " + ", ".join(f"{k} {r[k]}" for k in _SHOWN if r.get(k) not in (None, {}, [])) for r in found
    ]


def under_mps() -> bool:
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ


def judged(told: dict[str, Any], kind: str, record_property: pytest.RecordProperty) -> dict[str, Any]:
    fault = next(f for f in told["faults"] if f["kind"] == kind)
    noticed = "not noticed" if fault["detection_s"] is None else f"noticed after {fault['detection_s']:.2f} s"
    same = "same digest" if told["same_digest"] else "another digest"
    stall = f"stall {fault['stall_s']:.1f} s" if fault["stall_s"] is not None else "no step after it"
    record_property("told", f"{noticed}, {stall}, {fault['lost_steps']} steps lost, {same}")
    assert told["passed"], told["how"]
    return fault


@pytest.mark.parametrize("kind", [kind for kinds in GROUPS.values() for kind in kinds])
def test_a_run_ends_as_if_nobody_had_broken_it(
    kind: str, drilled: Path, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    group = next(name for name, kinds in GROUPS.items() if kind in kinds)
    told = found(crew, drilled, group)
    fault = judged(told, kind, record_property)
    if kind == "nan":
        assert told["left_out_samples"] == BATCH
    else:
        assert told["same_digest"], "another digest"
    if kind != "slow":
        assert fault["detection_s"] is not None, "nobody noticed"


@pytest.mark.parametrize("kind", ISLANDS)
def test_islands_go_on_without_the_one_that_is_broken(
    kind: str, folder: Path, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    told = found(crew, folder, "islands")
    fault = judged(told, kind, record_property)
    assert told["same_digest"], "another digest"
    seen = failures(folder, "islands")
    if under_mps() and any(word in line for line in seen for word in NOT_OURS):
        return  # MPS ended a client of the other island with the one that was killed: it cost steps, no bit
    assert fault["lost_steps"] <= 1, seen


def test_every_kind_of_fault_is_drilled() -> None:
    assert {*ISLANDS, *(kind for kinds in GROUPS.values() for kind in kinds)} == set(SCENARIOS)
