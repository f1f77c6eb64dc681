"""Real models cut over peers, on loopback: the losses and weights of one process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.fleet.stage_runs import LOOPBACK, Network, Peers

from shoal.errors import NumericsError, SpecError
from shoal.journal.journal import records
from shoal.spec import dump
from shoal.spec.run import Run
from shoal.stages.layers import StageLayers
from tests.namespaces import need_namespaces
from tests.stages.toy import Pond
from tests.train.tiny import make_data, make_run, train_on

STEPS, BATCH, ROWS = 6, 8, 1
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def a_run(data: Path, **changes: Any) -> Run:
    settings = {"train.steps": STEPS, "train.batch": BATCH, "mesh.micro_batch": ROWS, "train.clip": 0.5, "seed": 3}
    return make_run(data, **{"model.layers": 4, "model.tie_embeddings": False, **settings, **changes})


@pytest.fixture(scope="module")
def losses_of_one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = train_on(a_run(data), tmp_path_factory.mktemp("one"), 1)
    return [r["loss"] for r in records(run_dir.journal_file) if r["kind"] == "step"]


def trained(counts: list[int], run: Run, folder: Path) -> tuple[Pond, list[float]]:
    def make(stage: int, peer: str) -> StageLayers:
        return StageLayers(run, stage, folder / peer[:8], CPU)

    async def main() -> tuple[Pond, list[float]]:
        pond = Pond(counts, BATCH // ROWS, STEPS, make)
        for stage in pond.layout:
            for peer in stage:
                await pond.start(peer)
        for peer in pond.peers:
            pond.run(peer)
        async with asyncio.timeout(900):
            await asyncio.gather(*pond.tasks.values())
        await pond.close()
        first = pond.layout[0][0]
        return pond, [e["loss"] for p, kind, e in pond.events if kind == "step" and p == first]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("counts", "settings", "within"),
    [
        ([1, 1, 1], {"activations": "fp32"}, 1e-5),
        ([2, 1], {"activations": "fp32", "gradients": "bf16"}, 1e-3),
        ([2, 2], {"activations": "int8", "gradients": "int8"}, 1e-2),
    ],
)
def test_a_model_cut_over_peers_learns_as_in_one_process(
    data: Path,
    losses_of_one: list[float],
    tmp_path: Path,
    counts: list[int],
    settings: dict[str, Any],
    within: float,
) -> None:
    run = a_run(data, **{"swarm.stages": {"count": len(counts), **settings}})
    pond, losses = trained(counts, run, tmp_path)
    assert losses == pytest.approx(losses_of_one, rel=within)
    assert losses[-1] < losses[0] - 0.1
    for stage in pond.layout:
        assert len({pond.works[p].digest() for p in stage}) == 1


def test_a_subspace_makes_messages_smaller_and_still_learns(data: Path, tmp_path: Path) -> None:
    run = a_run(data, **{"swarm.stages": {"count": 2, "rank": 8}, "train.optimizer.lr": 1e-2})
    pond, losses = trained([1, 1], run, tmp_path)
    assert losses[-1] < losses[0] - 0.1
    assert {w.message_bytes for w in pond.works.values()} == {32 * (8 + 2)}  # of 32 x 32 x 2 in bf16


def test_what_cannot_be_cut_is_said(data: Path, tmp_path: Path) -> None:
    tied = a_run(data, **{"model.tie_embeddings": True, "swarm.stages": {"count": 2}})
    with pytest.raises(SpecError, match="tie_embeddings to false"):
        StageLayers(tied, 0, tmp_path, CPU)
    with pytest.raises(SpecError, match=r"mesh\.micro_batch 3"):
        StageLayers(a_run(data, **{"mesh.micro_batch": 3}), 0, tmp_path, CPU)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_step_of_what_is_no_number_is_not_taken(data: Path, tmp_path: Path, wrong: float) -> None:
    """`min(1, limit / NaN)` is 1: the step would have been taken, with weights that are NaN from then on."""
    lead = StageLayers(a_run(data, **{"swarm.stages": {"count": 2}}), 0, tmp_path, CPU)
    for squares, loss in ((wrong, 1.0), (1.0, wrong)):
        with pytest.raises(NumericsError, match=r"In step 1 .* is not finite: lower train\.optimizer\.lr"):
            lead.factor(1, squares, loss)


def test_a_saved_state_is_the_state(data: Path, tmp_path: Path) -> None:
    run = a_run(data, **{"swarm.stages": {"count": 2}})
    pond, _ = trained([1, 1], run, tmp_path)
    work = pond.works[pond.layout[1][0]]
    again = StageLayers(run, 1, tmp_path / pond.layout[1][0][:8], CPU)
    assert again.saved() == [0, 3, 6]
    again.load(6)
    assert again.state() == work.state()
    longer = a_run(data, **{"swarm.stages": {"count": 2}, "train.steps": 2 * STEPS})
    with pytest.raises(SpecError, match="a model cut over peers is not prolonged"):
        StageLayers(longer, 1, tmp_path / pond.layout[1][0][:8], CPU).load(6)
    again.load(0)
    assert again.digest() == StageLayers(run, 1, tmp_path / "new", CPU).digest()


@pytest.mark.slow
def test_real_processes_go_on_when_one_of_two_peers_of_a_stage_is_killed(data: Path, tmp_path: Path) -> None:
    killed(data, tmp_path, LOOPBACK)


@pytest.mark.cluster
def test_peers_far_apart_go_on_when_one_of_two_peers_of_a_stage_is_killed(data: Path, tmp_path: Path) -> None:
    need_namespaces()
    killed(data, tmp_path, Network(mbit=100.0, rtt_ms=40.0, loss=0.001))


def killed(data: Path, folder: Path, network: Network) -> None:
    """Peers as a user starts them, and kill -9 for one of them."""
    steps = 30
    changes = {"train.steps": steps, "swarm.stages": {"count": 2}, "swarm.silent": "2 s"}
    (folder / "run.yaml").write_text(dump(a_run(data, **changes, checkpoint={})))
    command = [sys.executable, "-m", "shoal.stages", "run", str(folder / "run.yaml")]
    with Peers(command, [1, 2], folder, network) as peers:
        peers.until(lambda: peers.steps(1, 1) >= 3, 240)
        peers.kill(1, 1)
        done = peers.finish(240)
    for stage in (0, 1):
        assert [r["step"] for r in done.steps(stage)] == list(range(1, steps + 1))
    assert done.losses()[-1] < done.losses()[0] - 0.3
    assert len(done.events("rerouted")) == 1
    assert not done.events("went_back")


def test_peers_with_other_settings_or_data_are_told_apart(data: Path, tmp_path: Path) -> None:
    def fingerprint(where: Path, **changes: Any) -> str:
        return StageLayers(a_run(where, **{"swarm.stages": {"count": 2}, **changes}), 0, tmp_path, CPU).fingerprint

    (tmp_path / "data").symlink_to(data)
    other = make_data(tmp_path / "other", seed=1)
    same = fingerprint(data)
    assert same == fingerprint(tmp_path / "data")
    assert len({same, fingerprint(other), fingerprint(data, seed=4), fingerprint(data, **{"train.clip": 1.0})}) == 4
