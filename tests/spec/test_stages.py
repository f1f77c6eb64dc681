"""Pipeline stages are balanced by cost, exactly; two-stage schedules balance the processes too."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from shoal.errors import SpecError
from shoal.spec.model import Experts, Model
from shoal.spec.shape import Shape, shape_of
from shoal.spec.stages import layer_costs, micro_batches_fit, stage_count, stages_of, stretches

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zbv"]


def shape(**fields: object) -> Shape:
    return shape_of(Model(**{"vocab_size": 512, "dim": 64, "layers": 9, **fields}))  # type: ignore[arg-type]


SHAPES = [
    shape(),
    shape(vocab_size=50_000),  # a head of many layers' cost
    shape(layers=11, experts=Experts(count=8, top_k=2, ffn_dim=96, shared=1, dense_layers=3)),
    shape(layers=10, sliding_window=16, full_attention_layers=4),
]


def every_split(layers: int, stages: int) -> list[list[range]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [[range(a, b) for a, b in pairwise((0, *cut, layers))] for cut in cuts]


def cost_of(split: list[range], costs: list[float], pp: int, schedule: str) -> tuple[float, float]:
    stage = [sum(costs[i] for i in layers) for layers in split]
    return max(stage), max(sum(stage[s] for s in stages_of(r, pp, schedule)) for r in range(pp))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_no_split_is_better_balanced(which: int, pp: int, schedule: str) -> None:
    model = SHAPES[which]
    costs = layer_costs(model, seq_len=128)
    split = stretches(model, pp, schedule, seq_len=128)
    assert [layer for layers in split for layer in layers] == list(range(model.layers))
    assert len(split) == stage_count(pp, schedule)
    assert all(len(layers) >= 1 for layers in split)
    best = min(cost_of(other, costs, pp, schedule) for other in every_split(model.layers, len(split)))
    assert cost_of(split, costs, pp, schedule) == pytest.approx(best, rel=1e-12)


def test_the_head_takes_the_place_of_layers() -> None:
    llama_8b = shape(vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14_336)
    last = stretches(llama_8b, 4, "1f1b", seq_len=8192)[-1]
    assert len(last) == 6  # 8.67 without the head
    assert sum(layer_costs(llama_8b, 8192)) == pytest.approx(llama_8b.flops_per_token(8192, causal=True), rel=0.01)


def test_equal_layers_without_much_of_a_head_are_shared_evenly() -> None:
    sizes = [len(layers) for layers in stretches(shape(layers=16, vocab_size=64), 4, "gpipe")]
    assert sizes == [4, 4, 4, 4]


def test_a_long_window_costs_more_than_a_sliding_one() -> None:
    costs = layer_costs(SHAPES[3], seq_len=1024)
    assert costs[1] > costs[5]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_every_stage_has_one_process(pp: int, schedule: str) -> None:
    held = [stage for rank in range(pp) for stage in stages_of(rank, pp, schedule)]
    assert sorted(held) == list(range(stage_count(pp, schedule)))


def test_the_largest_models_are_split_quickly() -> None:
    llama_405b = shape(vocab_size=128_256, dim=16_384, layers=126, heads=128, kv_heads=8, ffn_dim=53_248)
    for schedule in SCHEDULES:
        split = stretches(llama_405b, 16, schedule, seq_len=8192)
        assert split[-1].stop == 126


def test_too_few_layers_are_refused_with_the_largest_pp_that_works() -> None:
    with pytest.raises(SpecError, match=r"9 layers cannot fill 10 pipeline stages .* at most 4"):
        stretches(shape(), 5, "zbv")


def test_micro_batches_that_torch_refuses_do_not_fit() -> None:
    assert not micro_batches_fit(3, 4, "1f1b")
    assert micro_batches_fit(4, 4, "1f1b")
    assert not micro_batches_fit(9, 4, "interleaved")
    assert micro_batches_fit(10, 4, "interleaved")
    assert micro_batches_fit(1, 4, "zbv")
