"""On a GPU a run compiles in its first two steps and never again: on 2, 4 and 8 ranks, whichever documents its batches
hold, with padding between packed pairs, and around evaluations that are in another precision than training.

A part of `make test-gpu` (tests/gpu/suite.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.journal.rundir import RunDir
from shoal.spec.run import Run
from tests.gpu.crew import Crew
from tests.gpu.here import DEVICE, needs_device
from tests.gpu.train_apart import graphs_of, task
from tests.train.matrix import Job
from tests.train.tiny import losses_of, make_data, make_run

pytestmark = needs_device

STEPS = 200 if DEVICE == "cuda" else 12
FEW = 24 if DEVICE == "cuda" else 8
BF16 = 2e-3  # eager and compiled round at other places
MODEL = {"dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 256, "init": "normal"}


@dataclass(frozen=True)
class Case:
    name: str
    world: int
    steps: int = FEW
    data: str = "data"
    more: dict[str, Any] = field(default_factory=dict)
    like: Case | None = None  # whose losses it has to have


EVALUATED = {"data.eval": "eval", "eval.every": 4}
PAIRS = {"data.packing": "best-fit"}
PLAIN = Case("pairs, plain kernels", 1, data="pairs", more={**PAIRS, "train.kernels": "plain", "train.compile": False})
CASES = [
    *(Case(f"documents on {world} ranks", world, STEPS) for world in (2, 4, 8)),
    Case("bf16 that is evaluated", 1, more=EVALUATED),
    Case("pairs", 1, data="pairs", more=PAIRS, like=PLAIN),
    Case("pairs on 2 ranks", 2, data="pairs", more=PAIRS, like=PLAIN),
    Case("pairs, not compiled", 1, data="pairs", more={**PAIRS, "train.compile": False}, like=PLAIN),
]
if DEVICE == "cuda":  # 8 bits are computed there only
    EIGHT = {"train.precision": "fp8", **EVALUATED}
    CASES += [
        Case("fp8 that is evaluated", 1, more=EIGHT),
        Case("fp8 that is evaluated, 2 ranks", 2, more=EIGHT),
        Case("fp8 that is evaluated in fp8", 1, more={**EIGHT, "eval.precision": "fp8"}),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, crew: Crew) -> Path:
    folder = tmp_path_factory.mktemp("compiles")
    for name, options in {
        "data": {"documents": 2000},
        "pairs": {"documents": 2000, "masked": True},
        "eval": {},
    }.items():
        make_data(folder / name, **options)
    for case in sorted([*CASES, PLAIN], key=lambda c: -c.world):
        crew.add(task(folder, Job(run_of(case, folder), case.world), limit_s=130))
    return folder


def run_of(case: Case, folder: Path) -> Run:
    changes = {
        "name": name_of(case),
        "model": MODEL,
        "resources.device": DEVICE,
        "train.compile": DEVICE == "cuda",
        "train.steps": case.steps,
        "train.batch": 16,
        "mesh.dp_shard": case.world,
        "data.seq_len": 64,
        **case.more,
    }
    if "data.eval" in changes:
        changes["data.eval"] = str(folder / changes["data.eval"])
    if DEVICE == "cpu":
        changes |= {"train.compile": False, "train.kernels": "plain"}
    return make_run(folder / case.data, **changes)


def name_of(case: Case) -> str:
    return "".join(c if c.isalnum() else "-" for c in case.name)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_nothing_is_compiled_after_the_second_step(
    case: Case, folder: Path, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    crew.done(name_of(case))
    run_dir, told = RunDir.of(name_of(case), folder), []
    for rank in range(case.world):
        graphs = graphs_of(run_dir, rank)
        assert len(graphs) == case.steps + 1
        later = [i + 1 for i in range(2, len(graphs)) if graphs[i] > graphs[i - 1]]
        told.append(graphs[1])
        assert not later or "eval.every" in case.more, f"rank {rank} compiled again at steps {later}"
        # An evaluation that is first met after step 2 may have its own graphs, once.
        assert len(later) <= 1, f"rank {rank} compiled again at steps {later}"
    if DEVICE == "cuda" and case.more.get("train.compile") is not False:
        assert min(told) > 0, "nothing was compiled: the test tests nothing"
    record_property("told", f"{case.steps} steps, graphs {told[0]}")


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if c.like])
def test_packed_pairs_have_the_losses_of_plain_kernels(
    case: Case, folder: Path, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    assert case.like
    crew.done(name_of(case.like))
    crew.done(name_of(case))
    plain, mine = (losses_of(RunDir.of(name_of(c), folder)) for c in (case.like, case))
    assert len(plain) == len(mine) == case.steps
    assert plain[-1] < plain[0]
    off = np.abs(mine / plain - 1)
    record_property("told", f"step 1 {off[0]:.1e}, all {off.max():.1e} (bar {BF16:.1e})")
    assert off.max() <= BF16, off
