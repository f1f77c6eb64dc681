"""Gradients that go to their shards with every micro-batch: the same step as once, for more traffic and less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.plan.traffic import step_of, traffic
from shoal.spec import load
from shoal.spec.shape import shape_of
from tests.slow import some_slow
from tests.train.tiny import digest_of, losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

MESHES = {
    "2x1": {"dp_shard": 2},
    "2x2": {"dp_replicate": 2, "dp_shard": 2},
    "2x2 with tp, bf16": {"dp_shard": 2, "tp": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def trained(data: Path, workspace: Path, mesh: dict[str, int], reduce: str) -> RunDir:
    settings: dict[str, Any] = {f"mesh.{name}": size for name, size in mesh.items()}
    settings |= {"mesh.reduce": reduce, "mesh.micro_batch": 1}
    few = {"train.steps": 3, "train.batch": 8, "train.schedule.warmup_steps": 1}
    few |= {"train.precision": "bf16" if "tp" in mesh else "fp32"}
    return train_on(make_run(data, **few, **settings), workspace, int(np.prod(list(mesh.values()))))


def scattered(run_dir: RunDir) -> dict[tuple[str, str], list[float]]:
    """What the third step has sent, which is what the formula says."""
    (record,) = [r for r in records(run_dir.journal_file) if r["kind"] == "traffic"]
    counted = {(row["axis"], row["op"]): [row["calls"], row["bytes"]] for row in record["rows"]}
    run = load(run_dir.spec_file).run
    assert counted == traffic(step_of(run, shape_of(run.model)))
    return counted


@pytest.mark.parametrize("mesh", some_slow(["2x1", "2x2", "2x2 with tp, bf16"], slow=["2x2", "2x2 with tp, bf16"]))
def test_both_ways_take_the_same_steps(mesh: str, data: Path, tmp_path: Path) -> None:
    once = trained(data, tmp_path / "once", MESHES[mesh], "step")
    each = trained(data, tmp_path / "each", MESHES[mesh], "micro_batch")
    near = 1e-6 if "bf16" not in mesh else 1e-2
    assert losses_of(each) == pytest.approx(losses_of(once), rel=near)
    norms = [[s["grad_norm"] for s in steps_of(run_dir)] for run_dir in (once, each)]
    assert norms[1] == pytest.approx(norms[0], rel=near)
    left, sent = scattered(once), scattered(each)
    times = 4 if mesh != "2x2" else 2  # micro-batches of a process
    key = ("shard", "reduce_scatter")
    assert sent.pop(key) == [times * n for n in left.pop(key)]
    if "tp" in mesh:
        norms_of_blocks = ("tp", "all_reduce")  # which all hold whole: before they are scattered, in bf16 when at once
        assert sent.pop(norms_of_blocks) == [times * left[norms_of_blocks][0], times * left.pop(norms_of_blocks)[1] / 2]
    assert sent == left  # copies are summed once in either case, and nothing else has changed
    if mesh == "2x1":
        assert digest_of(trained(data, tmp_path / "auto", MESHES[mesh], "auto")) == digest_of(once)
