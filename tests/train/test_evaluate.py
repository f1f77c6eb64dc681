"""Evaluation: the same number on every layout, a loss for each set, in the precision that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data.windows import Batch
from shoal.decide.auto import decide
from shoal.errors import SpecError
from shoal.journal import journal
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.train.evaluate import names_of, shared_out
from tests.plan.runs import closed
from tests.train.tiny import make_data, make_run, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")


def test_evaluation_is_the_same_number_on_every_layout(tmp_path: Path) -> None:
    """53 windows, micro-batches of 4: on 2 and 4 processes the last batches are filled up, and that counts nothing."""
    train, held_out = make_data(tmp_path / "train"), make_data(tmp_path / "eval", documents=55, seed=7)
    numbers = []
    for world, shard in ((1, 1), (2, 2), (4, 1)):
        changes = {"name": f"eval-{world}", "data.eval": str(held_out), "train.steps": 2, "mesh.micro_batch": 4}
        run = make_run(train, **changes, **{"mesh.dp_shard": shard})
        records = journal.records(train_on(run, tmp_path, world).journal_file)
        (found,) = [r for r in records if r["kind"] == "eval"]
        numbers.append((found["targets"], found["loss"]))
    assert len({targets for targets, _ in numbers}) == 1
    losses = np.array([loss for _, loss in numbers])
    assert np.ptp(losses) / losses[0] < 1e-5


def test_each_held_out_set_has_its_loss_and_the_mean_goes_by_their_weights(tmp_path: Path) -> None:
    """Two sets of unlike sizes, alone on one process and both on two: neither pooled nor counted alike."""
    train = make_data(tmp_path / "train")
    for name, documents in (("web", 60), ("code", 12)):
        make_data(tmp_path / name / "eval", documents=documents, seed=documents)
    one = {"train.steps": 2, "mesh.micro_batch": 4}
    alone = {}
    for name in ("web", "code"):
        run = make_run(train, name=name, **one, **{"data.eval": str(tmp_path / name / "eval")})
        (alone[name],) = (r for r in journal.records(train_on(run, tmp_path, 1).journal_file) if r["kind"] == "eval")
        assert "sets" not in alone[name]
    sets = [
        {"path": str(tmp_path / "web" / "eval"), "weight": 1},
        {"path": str(tmp_path / "code" / "eval"), "weight": 3},
    ]
    run_dir = train_on(make_run(train, name="both", **one, **{"data.eval": sets}), tmp_path, 2)
    (found,) = (r for r in journal.records(run_dir.journal_file) if r["kind"] == "eval")
    assert [(s["name"], s["weight"], s["targets"]) for s in found["sets"]] == [
        ("web/eval", 1.0, alone["web"]["targets"]),
        ("code/eval", 3.0, alone["code"]["targets"]),
    ]
    losses = {s["name"].split("/")[0]: s["loss"] for s in found["sets"]}
    assert losses == pytest.approx({name: r["loss"] for name, r in alone.items()}, rel=1e-5)
    assert found["loss"] == pytest.approx((losses["web"] + 3 * losses["code"]) / 4, rel=1e-9)
    assert found["targets"] == sum(r["targets"] for r in alone.values())


@pytest.mark.parametrize(
    ("sizes", "weights", "limit", "counts"),
    [
        ((100,), (2.0,), None, [100]),
        ((100,), (2.0,), 7, [7]),
        ((100, 100), (1.0, 3.0), 40, [10, 30]),
        ((100, 5), (1.0, 3.0), 40, [35, 5]),  # what a small set has no room for goes to the others
        ((100, 100, 100), (1.0, 1.0, 1.0), 40, [14, 13, 13]),
        ((100, 100, 100), (1.0, 1.0, 1e-9), 2, [1, 1, 1]),  # none is left without a loss
    ],
)
def test_windows_to_evaluate_on_are_shared_out_by_weight(
    sizes: tuple[int, ...], weights: tuple[float, ...], limit: int | None, counts: list[int]
) -> None:
    assert shared_out(sizes, weights, limit) == counts


def test_names_of_sets_are_as_short_as_tells_them_apart() -> None:
    assert names_of(["/data/web", "s3://bucket/code/"]) == ["web", "code"]
    assert names_of(["/data/web/eval", "/data/code/eval"]) == ["web/eval", "code/eval"]
    assert names_of(["/data/web", "/data/web"]) == ["/data/web", "/data/web"]


FP8 = {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64}  # sides that 8 bits take
PLACE = Place(0, 1, torch.device("cpu"))


def a_batch() -> Batch:
    tokens = np.random.default_rng(0).integers(0, 256, (2, 64))
    positions = np.broadcast_to(np.arange(64), tokens.shape).copy()
    return Batch(tokens, np.roll(tokens, -1, 1), positions, np.zeros_like(positions, np.int32))


def held_out_loss(train: str, evaluated: str) -> tuple[float, float]:
    """Without gradients, and that of the training pass after it."""
    run = closed(FP8, **{"train.precision": train, "eval.precision": evaluated, "train.kernels": "plain"})
    model = build(run, PLACE)
    return float(model.loss([a_batch()])), float(model.backward([a_batch()]))


def test_a_run_in_8_bits_is_evaluated_in_16_unless_it_is_asked_for() -> None:
    in_16, in_8 = held_out_loss("bf16", "auto"), held_out_loss("fp8", "fp8")
    by_default = held_out_loss("fp8", "auto")
    assert in_8[0] == in_8[1] != in_16[0]
    assert by_default == (in_16[0], in_8[1])  # to the bit, the output layer too; and training goes on in 8 bits
    assert held_out_loss("fp8", "bf16") == by_default


@pytest.mark.parametrize(
    ("train", "evaluated", "found"), [("fp32", "auto", "fp32"), ("auto", "auto", "fp32"), ("auto", "bf16", None)]
)
def test_an_evaluation_says_its_precision_and_one_that_cannot_be_is_refused(
    train: str, evaluated: str, found: str | None, tmp_path: Path
) -> None:
    run = make_run(make_data(tmp_path / "data"), **{"train.precision": train, "eval.precision": evaluated})
    if found is None:
        with pytest.raises(SpecError, match=r"eval\.precision bf16 does not go with train\.precision fp32"):
            decide(run, tmp_path, 1)
    else:
        assert decide(run, tmp_path, 1).run.eval.precision == found
