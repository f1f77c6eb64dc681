"""One run, many layouts, one curve: processes, sharding and accumulation change nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.journal.rundir import RunDir
from tests.train.tiny import losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

TOLERANCE = 1e-5  # relative, float32, at each step
# Few steps, and large ones: a curve all the same, and what is wrong with a layout shows in the first two. Windows that
# hold whole documents: with masked tokens they are packed by best fit, and a twelfth of what is read is padding.
SHORT = {"data.seq_len": 64, "train.steps": 5, "train.optimizer.lr": 1e-2, "train.schedule.warmup_steps": 1}
DATA = {"documents": False, "documents and masked tokens": True}

# name: (processes, dp_replicate, dp_shard, micro-batch of 16 windows a step)
LAYOUTS = {
    "1 process, 2 accumulation steps": (1, 1, 1, 8),
    "1 process, 4 accumulation steps": (1, 1, 1, 4),
    "DDP 2": (2, 2, 1, 8),
    "DDP 2, 4 accumulation steps": (2, 2, 1, 2),
    "DDP 4": (4, 4, 1, 4),
    "FSDP2 2": (2, 1, 2, 8),
    "FSDP2 2, 2 accumulation steps": (2, 1, 2, 4),
    "FSDP2 4": (4, 1, 4, 4),
    "FSDP2 4, 4 accumulation steps": (4, 1, 4, 1),
    "HSDP 2 x 2": (4, 2, 2, 4),
    "HSDP 2 x 2, 2 accumulation steps": (4, 2, 2, 2),
}
# With masked tokens, where means differ most, every layout that others do not speak for; the rest for `make test-slow`.
SPOKEN_FOR = ("1 process, 2 accumulation steps", "DDP 4", "FSDP2 4", "FSDP2 4, 4 accumulation steps", "HSDP 2 x 2")
FEW = ("HSDP 2 x 2",)
CASES = [
    pytest.param(
        data,
        layout,
        marks=[] if layout in (set(LAYOUTS) - set(SPOKEN_FOR) if DATA[data] else FEW) else [pytest.mark.slow],
    )
    for data, masked in DATA.items()
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunDir]:
    """The reference: one process, no accumulation."""
    folder = tmp_path_factory.mktemp("parity")
    data = make_data(folder / "data", masked=DATA[request.param])
    run = make_run(data, **{**SHORT, "mesh.micro_batch": 16})
    return data, train_on(run, folder, 1)


@pytest.mark.parametrize(("alone", "layout"), CASES, indirect=["alone"])
def test_every_layout_gives_the_curve_of_one_process(layout: str, alone: tuple[Path, RunDir], tmp_path: Path) -> None:
    data, reference = alone
    world, replicate, shard, micro = LAYOUTS[layout]
    mesh = {"mesh.dp_replicate": replicate, "mesh.dp_shard": shard, "mesh.micro_batch": micro}
    run = make_run(data, **{**SHORT, **mesh})
    laid_out = train_on(run, tmp_path, world)
    losses = losses_of(laid_out)
    assert len(losses) == len(losses_of(reference)) == SHORT["train.steps"]
    assert np.max(np.abs(losses / losses_of(reference) - 1)) < TOLERANCE
    # What is clipped hides a wrong factor in the gradient: its norm does not.
    norms, expected = ([r["grad_norm"] for r in steps_of(d)] for d in (laid_out, reference))
    assert norms == pytest.approx(expected, rel=10 * TOLERANCE)
    assert losses[-1] < 0.9 * losses[0]  # and it is a curve, not a line


def test_muon_gives_the_same_curve_sharded(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    curves = []
    for world, shard in ((1, 1), (2, 2)):
        muon = {"name": f"muon{world}", "train.optimizer.name": "muon", "mesh.dp_shard": shard}
        run = make_run(data, **{**SHORT, **muon})
        curves.append(losses_of(train_on(run, tmp_path, world)))
    assert np.max(np.abs(curves[1] / curves[0] - 1)) < TOLERANCE
    assert curves[0][-1] < 0.9 * curves[0][0]


def test_the_loss_is_the_mean_over_the_targets_of_the_global_batch(tmp_path: Path) -> None:
    """With uneven masks the mean of the processes' means is another number; the journal shows the right one."""
    data = make_data(tmp_path / "data", masked=True)
    records = steps_of(train_on(make_run(data, **{"train.steps": 3, "mesh.dp_replicate": 4}), tmp_path, 4))
    assert all(0 < r["targets"] < r["tokens"] for r in records)
    assert len({r["targets"] for r in records}) > 1  # the counts do vary from step to step
    alone = steps_of(train_on(make_run(data, **{"name": "alone", "train.steps": 3}), tmp_path, 1))
    assert [r["targets"] for r in alone] == [r["targets"] for r in records]


def test_tied_embeddings_train_the_same_sharded(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    curves = []
    for world, shard in ((1, 1), (2, 2)):
        tied = {"name": f"tied{world}", "model.tie_embeddings": True, "mesh.dp_shard": shard}
        run = make_run(data, **{**SHORT, **tied})
        curves.append(losses_of(train_on(run, tmp_path, world)))
    assert np.max(np.abs(curves[1] / curves[0] - 1)) < TOLERANCE
