"""Held-out data in a model cut over peers: the numbers of one process, whoever computes them and whoever is lost."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import checkpoint
from shoal.checkpoint.find import open_checkpoint
from shoal.errors import DataError, NumericsError, SpecError
from shoal.journal.journal import records
from shoal.stages.layers import StageLayers
from shoal.stages.pending import History
from shoal.stages.routes import TRAIN, Plan, Sums
from shoal.stages.states import saves_at
from shoal.train.evaluate import evaluates_at
from tests.stages.test_layers import BATCH, CPU, ROWS, STEPS, a_run
from tests.stages.test_nonsense import begun
from tests.stages.toy import HELD_OUT, Pond, alone, data, deal_in_turn
from tests.train.tiny import make_data, train_on

EVERY, COUNT, MICRO = 2, 7, 4  # micro-batches of held-out data, more than a step has


def right(stages: int, steps: int) -> float:
    weights, _ = alone(stages, MICRO, steps)
    total = 0.0
    for m in range(COUNT):
        out = data(HELD_OUT, m)
        for w in weights:
            out *= w
        total += out * out / 2
    return total


def a_pond(counts: list[int], steps: int, silent_s: float = 10.0) -> Pond:
    pond = Pond(counts, MICRO, steps, silent_s=silent_s)
    pond.held_out, pond.evaluates = COUNT, lambda step: step % EVERY == 0 or step == steps
    return pond


def check(pond: Pond, left_out: str = "") -> None:
    weights, _ = alone(len(pond.layout), MICRO, pond.steps)
    measured = [step for step in range(1, pond.steps + 1) if pond.evaluates(step)]
    for stage, peers in enumerate(pond.layout):
        for peer in peers:
            if peer == left_out:
                continue
            told = pond.toys[peer].told
            assert [sums.step for sums in told] == measured
            for sums in told:
                assert sums.targets == (COUNT,)
                assert sums.losses[0] == pytest.approx(right(len(pond.layout), sums.step), rel=1e-12)
            assert pond.toys[peer].w == pytest.approx(weights[stage], abs=1e-12)


def test_all_peers_hear_the_losses_of_one_process_every_so_many_steps_and_at_the_end() -> None:
    async def main() -> Pond:
        pond = a_pond([2, 1, 2], steps=5)
        await begun(pond)
        async with asyncio.timeout(600):
            await asyncio.gather(*pond.tasks.values())
        await pond.close()
        return pond

    check(asyncio.run(main()))


def test_a_peer_that_is_lost_while_it_measures_is_replaced_by_its_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    deal_in_turn(monkeypatch)

    async def main() -> tuple[Pond, str]:
        pond = a_pond([1, 2], steps=4, silent_s=2.0)
        for stage in pond.layout:
            for peer in stage:
                await pond.start(peer)
        lost, measures = pond.layout[1][1], asyncio.Event()
        loop = asyncio.get_running_loop()

        def before(what: str, m: int) -> None:
            if what == "measure":
                loop.call_soon_threadsafe(measures.set)

        pond.toys[lost].before = before
        for peer in pond.peers:
            pond.run(peer)
        async with asyncio.timeout(600):
            measuring = asyncio.create_task(measures.wait())
            await asyncio.wait([measuring, *pond.tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            assert measuring.done(), "peers have ended before it had anything to measure"
            await pond.lose(lost)
            await asyncio.gather(*pond.tasks.values())
        await pond.close()
        return pond, lost

    pond, lost = asyncio.run(main())
    check(pond, left_out=lost)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two sets of unlike size, evaluated in the middle and at the end; the best is kept."""
    torch.set_num_threads(1)  # as the plain run: bits are compared
    there = tmp_path_factory.mktemp("held-out")
    sets = [{"path": str(make_data(there / f"eval-{n}", documents=n, seed=n)), "weight": n} for n in (9, 14)]
    saved = {"checkpoint.every": 0, "checkpoint.keep_best": 1, "checkpoint.keep": 2}
    return {"data": make_data(there / "train"), "changes": {"data.eval": sets, "eval.every": 3, **saved}}


def measured(folders: dict[str, Any], count: int, folder: Path) -> tuple[list[dict[str, Any]], Pond]:
    changes = {**folders["changes"], "swarm.stages": {"count": count, "activations": "fp32"}}
    run = a_run(folders["data"], **changes)
    told: list[dict[str, Any]] = []

    def make(stage: int, peer: str) -> StageLayers:
        tell = (lambda kind, **fields: told.append({"kind": kind, **fields})) if stage == 0 else lambda *_, **__: None
        return StageLayers(run, stage, folder / str(stage), CPU, tell)

    async def main() -> Pond:
        pond = Pond([1] * count, BATCH // ROWS, STEPS, make)
        pond.evaluates, pond.due = partial(evaluates_at, run), saves_at(run)
        await begun(pond)
        async with asyncio.timeout(600):
            await asyncio.gather(*pond.tasks.values())
        await pond.close()
        return pond

    pond = asyncio.run(main())
    return told, pond


def test_a_cut_model_is_evaluated_to_the_bits_of_one_process(folders: dict[str, Any], tmp_path: Path) -> None:
    run_dir = train_on(a_run(folders["data"], **folders["changes"]), tmp_path, 1)
    own = ("step", "loss", "targets", "precision", "sets")
    plain = [{key: r[key] for key in own} for r in records(run_dir.journal_file) if r["kind"] == "eval"]
    assert [r["step"] for r in plain] == [3, 6]
    for count in (1, 2):
        told, _ = measured(folders, count, tmp_path / str(count))
        assert [{key: r[key] for key in own} for r in told if r["kind"] == "eval"] == plain
        assert [r["kind"] for r in told] == ["eval", "checkpoint"] * 2  # measured before it is saved
        store = tmp_path / str(count) / "0" / "checkpoints"
        saved = [open_checkpoint(store, one.name) for one in checkpoint.published(store)]
        assert [found.extra["eval_loss"] for found in saved] == [r["loss"] for r in reversed(plain)]


def test_peers_with_other_held_out_data_are_told_apart(folders: dict[str, Any], tmp_path: Path) -> None:
    def fingerprint(**changes: Any) -> str:
        return StageLayers(a_run(folders["data"], **{**folders["changes"], **changes}), 0, tmp_path, CPU).fingerprint

    less = {"data.eval": folders["changes"]["data.eval"][:1]}
    others = [less, {"eval.windows": 3}, {"data.skip": [1]}]
    assert len({fingerprint(), *(fingerprint(**other) for other in others)}) == 4


def test_what_cannot_be_measured_is_said(folders: dict[str, Any], tmp_path: Path) -> None:
    hidden = make_data(tmp_path / "hidden", documents=9, masked=True, hidden=2.0)
    work = StageLayers(a_run(folders["data"], **{"data.eval": str(hidden)}), 0, tmp_path, CPU)
    _, last = work.measure(work.held_out - 1, None)
    assert last is not None
    with pytest.raises(DataError, match="has no target token"):
        work.add_up(None, 3, [last])
    with pytest.raises(SpecError, match=r"eval\.precision bf16 does not go with"):
        StageLayers(a_run(folders["data"], **{"eval.precision": "bf16"}), 0, tmp_path, CPU)
    work = StageLayers(a_run(folders["data"], **folders["changes"]), 0, tmp_path, CPU)
    work.decoder.head.weight.data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="held-out data after step 0 is not finite"):
        work.measure(0, None)


def test_batches_that_the_run_file_leaves_out_are_left_out(folders: dict[str, Any], tmp_path: Path) -> None:
    skipping, whole = (
        StageLayers(a_run(folders["data"], **{"data.skip": skip}), 0, tmp_path, CPU) for skip in ([1, 2], [])
    )
    for step, batch in ((0, 0), (1, 3), (2, 4)):
        for work, at in ((skipping, step), (whole, batch)):
            work.begin(at)
        for m in range(skipping.micro_batches):
            assert (skipping._batch(m).tokens == whole._batch(m).tokens).all()


def test_a_plan_that_measures_what_there_is_not_is_refused() -> None:
    a, b = "a" * 64, "b" * 64
    plan = Plan(1, 1, 1, 2, (a, b), ((a, b),) * 2, lead=a, phase=0, sums=Sums(2, (1.0,), (3,)))
    assert Plan.of_json(plan.to_json()) == plan
    layout = ((a,), (b,))
    assert plan.fits(layout, 2, 9, sets=1)
    assert not plan.fits(layout, 2, 9, sets=2)
    assert not plan.fits(layout, 2, 9)
    assert (Plan(1, 1, 1, 2, (a, b), (), lead=a).phase, Plan(1, 1, 1, 2, (a, b), ()).measures) == (TRAIN, False)


def test_a_gradient_is_not_taken_from_what_was_measured() -> None:
    """A peer that missed the plan of the step has measured with the same weights, and has no sum."""
    history, me = History(), "m"
    history.take(None, Plan(1, 1, 1, 4, (me,), ((me,),), phase=0), me)
    assert history.of((1, 4)) == (None, None)
