"""The parity matrix over NCCL, in float32: every mesh trains on the curve of one process.

Each rank has a GPU of its own where there are enough, else they share them (shoal.shared_gpu): it says what is right,
and nothing of speed. A part of `make test-gpu` (tests/gpu/suite.py).
"""

from __future__ import annotations

import pytest

from shoal.decide.torch_installed import impossible_schedules, installed
from shoal.journal import journal
from shoal.journal.rundir import RunDir
from tests.gpu.crew import Crew
from tests.gpu.here import DEVICE, GPUS, needs_device
from tests.gpu.train_apart import task
from tests.train.matrix import FULL, Case, Matrix, case

pytestmark = needs_device

STEPS = 6  # where they part they do so at once
MUON = {"train.optimizer.name": "muon"}
# The largest first: what is small fills the room beside them.
CASES = sorted([*FULL, case("llama", MUON, dp_shard=2), case("llama", MUON, tp=2)], key=lambda c: -c.processes)
TWO = case(dp_shard=2)


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, crew: Crew) -> Matrix:
    """All that is asked for is being trained: the references first, each of which several wait for."""
    matrix = Matrix(tmp_path_factory.mktemp("nccl"), STEPS, DEVICE)
    items = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params.get("case", TWO) for item in items if hasattr(item, "callspec")] or [TWO]
    pairs = [matrix.jobs(c) for c in asked if possible(c)]
    for job in [*(alone for alone, _ in pairs), *(mesh for _, mesh in pairs)]:
        crew.add(task(matrix.folder, job))
    return matrix


def possible(c: Case) -> bool:
    return c.mesh.get("schedule") not in impossible_schedules()


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_on_the_curve_of_one_process(
    case: Case, matrix: Matrix, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    if not possible(case):
        pytest.skip(f"torch {installed()} has no {case.mesh['schedule']}")
    for job in matrix.jobs(case):
        crew.done(job.run.name)
    result = matrix.result(case)
    record_property("told", f"loss {result.loss:.1e}, norm {result.norm:.1e}, logits {result.logits:.1e}")
    assert result.good, f"outside {result.bars}: {result}"


def test_a_run_whose_ranks_share_a_gpu_says_so(matrix: Matrix, crew: Crew) -> None:
    for job in matrix.jobs(TWO):
        crew.add(task(matrix.folder, job))
        crew.done(job.run.name)
    told = journal.records(RunDir.of(job.run.name, matrix.folder).journal_file)
    start = next(r for r in told if r["kind"] == "start")
    if DEVICE == "cuda" and GPUS < 2:
        assert "2 processes share 1 GPU" in start["sharing"]
    else:
        assert "sharing" not in start
