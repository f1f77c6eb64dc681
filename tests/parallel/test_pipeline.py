"""A pipeline computes what one process computes, in every schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.model.decoder import Decoder
from shoal.parallel import expert, recompute, tensor
from shoal.parallel.build import _autocast
from shoal.parallel.halves import divisible
from shoal.parallel.place import Place, lay_out
from shoal.spec.mesh import Sizes
from shoal.spec.model import Experts
from tests.parallel.pipelines import (
    SEQ,
    STEPS,
    Case,
    alone,
    assert_same_curve,
    batch,
    build,
    calls_counted,
    piped,
    tiny,
)
from tests.ranks import Rows, run_ranks
from tests.slow import some_slow

pytestmark = pytest.mark.usefixtures("kept_ranks")

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zbv"]


def check(case: Case, world: int, watch: Callable[[list[Decoder]], Any] | None = None) -> list[Any]:
    expected = alone(case)
    ranks = run_ranks(piped, world, case, watch, timeout_s=100)
    assert_same_curve([curve for curve, _ in ranks], expected)
    return [seen for _, seen in ranks]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_match_one_with_uneven_stages(schedule: str) -> None:
    check(Case(schedule, Sizes(pp=2), tiny(layers=5)), 2)


@pytest.mark.parametrize("schedule", some_slow(SCHEDULES, slow=["gpipe", "1f1b"]))
def test_four_processes_match_one_with_packed_documents(schedule: str) -> None:
    """Eight stages of nine layers in interleaved and zbv; more micro-batches than stages need."""
    check(Case(schedule, Sizes(pp=4), tiny(layers=9), micro_batches=8, rows=2, packed=True), 4)


def with_experts(schedule: str, sizes: Sizes) -> Case:
    def prepare(decoder: Decoder, place: Place) -> None:
        if sizes.tp > 1:
            tensor.split(decoder, place)
        expert.split(decoder, place)

    experts = Experts(count=4, top_k=2, ffn_dim=16, shared=1, dense_layers=1, z_loss=0.01)
    return Case(schedule, sizes, tiny(layers=4, experts=experts), prepare=prepare)


INSIDE = {  # what stages have inside
    "replicated": Case("zbv", Sizes(pp=2, dp_replicate=2)),
    "tensor-parallel": Case("zbv", Sizes(pp=2, tp=2), prepare=tensor.split),
    "experts": with_experts("zbv", Sizes(pp=2)),
    "experts dealt out": with_experts("interleaved", Sizes(pp=2, dp_shard=2, ep=2)),
    "experts sharded over tensor-parallel processes": with_experts("zbv", Sizes(pp=2, tp=2)),
}


CUT = ("tensor-parallel", "experts sharded over tensor-parallel processes")


@pytest.fixture(scope="module")
def inside() -> Rows:
    return Rows(piped, {name: (case.sizes.world, case) for name, case in INSIDE.items()}, timeout_s=100, slow=CUT)


@pytest.mark.parametrize("name", some_slow(INSIDE, slow=CUT))
def test_whatever_stages_have_inside_they_match_one_process(name: str, inside: Rows) -> None:
    assert_same_curve([curve for curve, _ in inside[name]], alone(INSIDE[name]))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "sizes"), [("zbv", Sizes(pp=2, dp_shard=2)), ("1f1b", Sizes(pp=2, tp=2))])
def test_stages_with_experts_match_one_process_in_other_schedules(schedule: str, sizes: Sizes) -> None:
    check(with_experts(schedule, sizes), sizes.world)


def test_fewer_micro_batches_than_stages_still_match() -> None:
    check(Case("zbv", Sizes(pp=4), tiny(layers=8), micro_batches=2), 4)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_zbv_leaves_weights_for_later_where_no_block_is_recomputed(mode: recompute.Mode) -> None:
    def watch(decoders: list[Decoder]) -> Callable[[], int]:
        import torch.distributed.pipelining.stage as stage

        return calls_counted(stage, "stage_backward_weight")

    case = Case("zbv", Sizes(pp=2), prepare=lambda decoder, _: recompute.apply(decoder, mode))
    halves = check(case, 2, watch)
    # The first stage has no input to hurry for: torch does all of its backward pass in the second half.
    assert halves == ([STEPS * 4 * 1, STEPS * 4 * 2] if mode == "none" else [0, 0])


@pytest.mark.parametrize("schedule", some_slow(SCHEDULES, slow=["gpipe", "1f1b", "interleaved"]))
def test_sharded_stages_match_one_process_and_reduce_once_a_step(schedule: str) -> None:
    def watch(decoders: list[Decoder]) -> Callable[[], tuple[int, int]]:
        import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups

        reduced = calls_counted(groups, "foreach_reduce")
        sharded = sum(len(d.blocks) + (d.first or d.last) for d in decoders)  # the root, where it has its own
        return lambda: (reduced(), STEPS * sharded)

    for reduced, expected in check(Case(schedule, Sizes(pp=2, dp_shard=2), tiny(layers=5), packed=True), 4, watch):
        assert reduced == expected


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", [8, 8]), ("1f1b", [2, 1])])
def test_one_forward_one_backward_holds_a_micro_batch_a_stage(schedule: str, most: list[int]) -> None:
    """GPipe holds all micro-batches at once; 1F1B as many as there are stages from here to the end."""

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, token: Any) -> Tensor:
            ctx.token = token  # lives as long as the graph does
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    class Token:
        pass

    def watch(decoders: list[Decoder]) -> Callable[[], int]:
        tokens: weakref.WeakSet[Any] = weakref.WeakSet()
        counts = [0]

        def mark(_block: Any, _inputs: Any, output: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return output
            token = Token()
            tokens.add(token)
            counts.append(len(tokens))
            return Mark.apply(output, token)

        next(iter(decoders[0].blocks.values())).register_forward_hook(mark)
        return lambda: max(counts)

    assert check(Case(schedule, Sizes(pp=2), micro_batches=8), 2, watch) == most


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_messages_are_freed_with_their_micro_batch(schedule: str) -> None:
    """torch would keep a buffer for each micro-batch, both ways."""

    def work(rank: int, world: int) -> int:
        case = Case(schedule, Sizes(pp=2), micro_batches=8)
        pipeline, _ = build(case, lay_out(rank, world, torch.device("cpu"), case.sizes))
        pipeline.backward(*batch(case, 0))
        order = pipeline._order
        stages = order._stages if hasattr(order, "_stages") else [order._stage]
        rows = [row for s in stages for row in (*s.args_recv_info.values(), *s.grad_recv_info.values())]
        assert len(rows) >= case.micro_batches
        return sum(info.buffer.numel() for row in rows for info in row if info.buffer is not None)

    assert run_ranks(work, 2) == [0, 0]


@pytest.mark.parametrize("sizes", [Sizes(pp=2), Sizes(pp=2, dp_shard=2)])
def test_bfloat16_stages_stay_near_the_float32_curve(sizes: Sizes) -> None:
    """Under autocast, which leaves the residual stream in float32, and under FSDP, which casts everything."""

    def prepare(decoder: Decoder, place: Place) -> None:
        if sizes.dp == 1:
            _autocast(decoder, place.device)

    case = Case("zbv", sizes, bf16=True, prepare=prepare)
    expected = alone(case)
    for curve, _ in run_ranks(piped, sizes.world, case):
        torch.testing.assert_close(curve.losses, expected.losses, rtol=5e-3, atol=0)
        assert curve.losses != expected.losses  # it did compute in bfloat16


def test_a_batch_of_another_size_is_refused() -> None:
    def work(rank: int, world: int) -> str:
        case = Case("1f1b", Sizes(pp=2))
        pipeline, _ = build(case, lay_out(rank, world, torch.device("cpu"), case.sizes))
        pipeline.backward(*batch(case, 0))
        with pytest.raises(ValueError, match="all its batches must have one size") as refused:
            pipeline.backward(*batch(Case("1f1b", Sizes(pp=2), rows=2), 0))
        return str(refused.value)

    assert f"4 micro-batches of 1 windows was given (8, {SEQ}) tokens" in run_ranks(work, 2)[0]


def test_evaluation_takes_any_number_of_windows() -> None:
    """Also fewer than there are stages, and a last micro-batch that is not full."""
    case = Case("zbv", Sizes(pp=2), rows=2)

    def work(rank: int, world: int, windows: int) -> float:
        pipeline, _ = build(case, lay_out(rank, world, torch.device("cpu"), case.sizes))
        pipeline.backward(*batch(case, 0))
        tokens, positions, _, targets = (t[:windows] if t is not None else t for t in batch(case, 1))
        return float(pipeline.loss(tokens, positions, None, targets))  # type: ignore[arg-type]

    model = Decoder(case.shape)
    model.init_weights(5)
    tokens, positions, _, targets = batch(case, 1)
    for windows in (1, 7):
        expected = float(model(tokens[:windows], positions[:windows], None, targets[:windows]).detach())
        assert run_ranks(work, 2, windows) == pytest.approx([expected, 0.0], rel=1e-5)


def test_compiled_blocks_do_their_backward_pass_at_once() -> None:
    decoder = Decoder(tiny())
    assert divisible(decoder)
    decoder.blocks["0"].compile()
    assert not divisible(decoder)
