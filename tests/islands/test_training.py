"""Real training on islands: the curve of one process, whoever dies; the same bits in deterministic mode."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.journal.journal import records
from tests.islands.archipelago import Archipelago
from tests.patience import Stopwatch
from tests.ranks import _warm
from tests.train.tiny import losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

STEPS = 24
PADDED = {"data.seq_len": 64}  # prompts and answers are packed by best fit: a twelfth of these windows is padding


def islands(tmp_path: Path, data: Path, name: str, world: int = 1, **changes: Any) -> Archipelago:
    _warm()
    spec = {"name": name, "train.steps": STEPS, "fleet.islands": 3, "fleet.shards": 8, "checkpoint.every": 10}
    return Archipelago(tmp_path, make_run(data, **{**PADDED, **spec, **changes}), world)


def check(fleet: Archipelago) -> str:
    """Every step once, of the whole batch, and one digest at the end."""
    steps = fleet.journal("step")
    assert [r["step"] for r in steps] == list(range(1, fleet.run.train.steps + 1))
    assert [r["position"] for r in steps] == [i * fleet.run.train.batch for i in range(len(steps))]
    (end,) = fleet.journal("finished")
    return str(end["digest"])


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and answers: windows with padding, whose targets differ in number from shard to shard."""
    return make_data(tmp_path_factory.mktemp("data"), masked=True)


@pytest.fixture(scope="module")
def plain(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    run = make_run(tiny_data, **PADDED, **{"train.steps": STEPS})
    return losses_of(train_on(run, tmp_path_factory.mktemp("plain"), 1))


def test_the_curve_is_that_of_one_process(tmp_path: Path, tiny_data: Path, plain: np.ndarray) -> None:
    with islands(tmp_path, tiny_data, "usual") as fleet:
        fleet.start(0, 1, 2)
        fleet.wait_for_step(8)
        fleet.kill(1)
        assert fleet.wait() == {0: {0}, 2: {0}}
        check(fleet)
        assert np.allclose(losses_of(fleet.run_dir), plain, rtol=2e-5)
        assert {tuple(r["islands"]) for r in fleet.journal("step")} == {(0, 1, 2), (0, 2)}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> str:
    """The bits of three deterministic islands to which nothing happens; they are those of any number of islands."""
    with islands(tmp_path_factory.mktemp("quiet"), tiny_data, "quiet", **{"fleet.deterministic": True}) as fleet:
        fleet.start(0, 1, 2)
        fleet.wait()
        return check(fleet)


def test_deterministic_islands_end_with_the_same_bits(tmp_path: Path, tiny_data: Path, quiet: str) -> None:
    # The first member dies, which also saves and writes the journal; it comes back, and another goes.
    with islands(tmp_path, tiny_data, "stormy", **{"fleet.deterministic": True, "train.steps": STEPS}) as fleet:
        fleet.start(0, 1, 2)
        fleet.wait_for_step(5)
        fleet.kill(0)
        fleet.wait_for_step(8)
        fleet.start(0)
        fleet.wait_for_step(12)
        fleet.kill(2)
        codes = fleet.wait()
        assert codes[1] == {0}
        assert check(fleet) == quiet
        assert [r["step"] for r in fleet.journal("checkpoint")] == [10, 20, 24]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"mesh.dp_shard": 2}, {"mesh.tp": 2}, {"mesh.pp": 2, "mesh.schedule": "gpipe"}])
def test_an_island_has_a_mesh_inside(tmp_path: Path, tiny_data: Path, plain: np.ndarray, mesh: dict[str, Any]) -> None:
    with islands(tmp_path, tiny_data, "meshed", world=2, **{"fleet.islands": 2, **mesh}) as fleet:
        fleet.start(0, 1)
        fleet.wait_for_step(6)
        fleet.kill(0, rank=1)
        fleet.start(0)
        codes = fleet.wait()
        assert codes[1] == {0}
        check(fleet)
        assert np.allclose(losses_of(fleet.run_dir), plain, rtol=2e-5)


def test_all_die_and_go_on_from_the_newest_checkpoint(tmp_path: Path, tiny_data: Path, quiet: str) -> None:
    changes = {"fleet.deterministic": True, "fleet.islands": 2}
    with islands(tmp_path, tiny_data, "dead", **changes) as fleet:
        fleet.start(0, 1)
        fleet.wait_for_step(14)
        fleet.kill(0)
        fleet.kill(1)
        fleet.start(1, 0)
        assert fleet.wait() == {0: {0}, 1: {0}}
        assert [r["step"] for r in fleet.journal("start")] == [0, 10]
        (end,) = fleet.journal("finished")
        assert end["digest"] == quiet


def test_told_to_stop_one_leaves_and_the_last_one_saves(tmp_path: Path, tiny_data: Path) -> None:
    changes = {"train.steps": 2000, "checkpoint.every": 0}
    with islands(tmp_path, tiny_data, "preempted", **changes) as fleet:
        fleet.start(0, 1, 2)
        fleet.wait_for_step(5)
        fleet.signal(0, signal.SIGTERM)
        fleet.wait_for_step(max(r["step"] for r in fleet.journal("step")) + 10)
        assert not fleet.journal("checkpoint")  # the others have the state, so nothing needs to be saved
        fleet.signal(1, signal.SIGTERM)
        fleet.signal(2, signal.SIGTERM)
        assert fleet.wait() == {0: {143}, 1: {143}, 2: {143}}
        last = max(r["step"] for r in fleet.journal("step"))
        assert [r["step"] for r in fleet.journal("checkpoint")] == [last]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "mesh"), [(1, {}), pytest.param(2, {"mesh.dp_shard": 2, "mesh.ep": 2}, marks=pytest.mark.slow)]
)
def test_experts_are_balanced_over_all_islands(
    tmp_path: Path, tiny_data: Path, world: int, mesh: dict[str, Any]
) -> None:
    # A z-loss that shows: it is weighed by the targets of the whole batch, most of which other islands compute.
    experts = {"model.experts": {"count": 4, "top_k": 2, "ffn_dim": 32, "balance_rate": 0.01, "z_loss": 1.0}}
    alone = train_on(make_run(tiny_data, **PADDED, **experts, **{"name": "alone", "train.steps": STEPS}), tmp_path, 1)
    expected = [r["expert_imbalance"] for r in steps_of(alone)]
    with islands(tmp_path, tiny_data, "experts", world, **experts, **mesh, **{"fleet.islands": 2}) as fleet:
        fleet.start(0, 1)
        fleet.wait_for_step(6)
        fleet.kill(0)
        fleet.start(0)
        assert fleet.wait()[1] == {0}
        check(fleet)
        assert np.allclose(losses_of(fleet.run_dir), losses_of(alone), rtol=1e-4)
        assert np.allclose([r["expert_imbalance"] for r in fleet.journal("step")], expected, atol=0.02)
        told = [r["step"] for r in records(alone.journal_file) if r["kind"] == "router"]
        assert [r["step"] for r in fleet.journal("router")] == told


def test_told_to_stop_while_it_looks_for_the_others_an_island_stops(tmp_path: Path, tiny_data: Path) -> None:
    with islands(tmp_path, tiny_data, "lonely") as fleet:
        fleet.start(0)
        watch = Stopwatch()
        while not list((fleet.run_dir.path / "fleet").glob("here/0-*.json")):
            assert watch.quiet_s() < 30
            time.sleep(0.05)
        fleet.signal(0, signal.SIGTERM)
        assert fleet.wait(15) == {0: {143}}  # sooner than it would have begun alone
        assert not fleet.journal("epoch")
