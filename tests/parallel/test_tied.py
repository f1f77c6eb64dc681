"""A tied embedding at both ends of a pipeline is one matrix to the optimizer, the norm and the checkpoint."""

from __future__ import annotations

import pytest
import torch

from shoal.parallel import tensor
from shoal.parallel.place import lay_out
from shoal.parallel.tied_embedding import NAME, Tied
from shoal.spec.mesh import Sizes
from tests.parallel.pipelines import Case, alone, assert_same_curve, build, piped, tiny
from tests.ranks import run_ranks
from tests.slow import some_slow

TIED = tiny(layers=8, tie_embeddings=True)

pytestmark = pytest.mark.usefixtures("kept_ranks")


def check(case: Case, world: int) -> None:
    """Gradients of both uses are summed, as one process sums them; and all copies stay the same to the last bit."""
    expected = alone(case)
    curves = [curve for curve, _ in run_ranks(piped, world, case, timeout_s=100)]
    assert_same_curve(curves, expected)
    copies = [curve.weights[NAME] for curve in curves if NAME in curve.weights]
    for copy in copies[1:]:
        assert torch.equal(copy, copies[0])


@pytest.mark.parametrize("schedule", some_slow(["gpipe", "1f1b", "zbv"], slow=["gpipe"]))
def test_ends_on_two_processes_or_one_match_one_process(schedule: str) -> None:
    check(Case(schedule, Sizes(pp=2), TIED), 2)


@pytest.mark.parametrize("schedule", some_slow(["interleaved", "zbv"], slow=["interleaved"]))
def test_ends_with_stages_between_them_match_one_process(schedule: str) -> None:
    check(Case(schedule, Sizes(pp=4), TIED), 4)


@pytest.mark.parametrize("schedule", some_slow(["1f1b", "zbv"], slow=["1f1b"]))
def test_sharded_ends_match_one_process(schedule: str) -> None:
    check(Case(schedule, Sizes(pp=2, dp_shard=2), TIED), 4)


def test_ends_cut_by_vocabulary_match_one_process() -> None:
    check(Case("1f1b", Sizes(pp=2, tp=2), TIED, prepare=tensor.split), 4)


def test_a_matrix_smaller_than_its_processes_has_empty_shards() -> None:
    """Three words over two processes and four: a shard of none is no message."""

    def work(rank: int, world: int) -> bool:
        case = Case("1f1b", Sizes(pp=2, dp_shard=4), tiny(layers=2, vocab_size=3, tie_embeddings=True))
        place = lay_out(rank, world, torch.device("cpu"), case.sizes)
        _, decoders = build(case, place)
        tied = Tied.of(decoders, place)
        assert tied is not None
        weight = decoders[0].embed.weight
        weight.grad = torch.ones_like(weight)
        tied.sum_gradients()
        return bool((weight.grad.to_local() == 2).all())  # type: ignore[attr-defined]

    assert all(run_ranks(work, 8))


@pytest.mark.parametrize(
    ("schedule", "tie", "expected"),
    [
        ("1f1b", True, ["owner", "none", "none", "borrower"]),
        ("zbv", True, ["both", "none", "none", "none"]),
        ("1f1b", False, ["none"] * 4),
    ],
)
def test_one_process_owns_the_matrix(schedule: str, tie: bool, expected: list[str]) -> None:
    def work(rank: int, world: int) -> str:
        case = Case(schedule, Sizes(pp=4), tiny(layers=8, tie_embeddings=tie))
        place = lay_out(rank, world, torch.device("cpu"), case.sizes)
        _, decoders = build(case, place)
        tied = Tied.of(decoders, place)
        if tied is None:
            return "none"
        if tied.local_copy is not None:
            assert tied.local_copy is decoders[1].embed.weight
            return "both"
        return "borrower" if tied.borrowed else "owner"

    assert run_ranks(work, 4) == expected
