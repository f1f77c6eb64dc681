"""The search: nothing better is missed, what is named is kept, what is found can be trained, and it is quick."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shoal.plan.asked import Asked
from shoal.plan.catalogue import find, find_fabric
from shoal.plan.explain import against, changes, make_it_fit, words
from shoal.plan.failures import preset
from shoal.plan.layouts import layouts
from shoal.plan.machine import Machine
from shoal.plan.memory import MODES
from shoal.plan.restarts import style
from shoal.plan.scaling import numbers, strong, weak
from shoal.plan.search import all_priced, priced, search
from shoal.plan.verdict import Range, verdict
from shoal.spec.mesh import Layout, Sizes, divisors
from shoal.spec.mesh.rules import broken
from tests.plan.asked import asked
from tests.slow import some_slow

MIXTURE = {
    "vocab_size": 32000,
    "dim": 2048,
    "layers": 12,
    "heads": 16,
    "kv_heads": 4,
    "experts": {"count": 8, "top_k": 2, "ffn_dim": 2048},
}


def every_layout(question: Asked) -> Iterator[Layout]:
    """By trying all numbers there are."""
    experts = question.shape.experts
    for pp, copies, shard, cp, tp in itertools.product(divisors(question.devices), repeat=5):
        if pp * copies * shard * cp * tp != question.devices:
            continue
        for ep, micro, schedule, way in itertools.product(
            divisors(experts.count) if experts else [1],
            divisors(question.run.train.batch),
            ["auto"] if pp == 1 else ["gpipe", "1f1b", "interleaved", "zbv"],
            ["auto"] if cp == 1 else ["all_to_all", "ring"],
        ):
            layout = Layout(Sizes(pp, copies, shard, cp, tp, ep), micro, schedule, way)
            if not broken(layout, question.work):
                yield layout


@pytest.mark.parametrize(
    "question",
    [
        asked("llama3-8b", 8, 8, "a100-40gb", 8192),  # tight: what fits decides
        asked("qwen2.5-0.5b", 8, 4),  # roomy: what is fast decides
        asked(MIXTURE, 4, 4, "rtx 4090", 2048),
    ],
    ids=lambda q: f"{q.shape.params / 1e9:.1f}B",
)
def test_no_layout_that_fits_is_faster_than_the_best_that_is_found(question: Asked) -> None:
    every = all_priced(question, list(every_layout(question)), MODES)
    fastest = min((one for one in every if one.fits), key=lambda one: one.seconds)
    best = search(question)[0]
    assert best.fits
    assert best.seconds <= fastest.seconds * 1.021  # an axis more has to be worth 0.5%
    same = priced(question, best.layout, best.recompute)
    assert same.seconds == pytest.approx(best.seconds)
    assert same.memory == best.memory


@pytest.mark.parametrize(
    "question",
    [
        asked("llama3-8b", 64, 512),
        asked("llama3-8b", 96, 768, seq=6144),
        asked("qwen3-30b-a3b", 64, 256),
        asked("smollm2-135m", 6, 12, "cpu"),  # 9 heads, 3 of keys
        asked("llama3-70b", 128, 128, "mi300x", 8192),
        asked("llama3-8b", 72, 576, "gb200"),
    ],
    ids=lambda q: f"{q.shape.params / 1e9:.1f}B-{q.devices}",
)
def test_every_layout_that_is_found_can_be_trained_and_is_another_mesh(question: Asked) -> None:
    found = search(question, 20)
    assert found
    assert not [why for one in found for why in broken(one.layout, question.work)]
    assert len({one.layout.sizes for one in found}) == len(found)
    assert all(one.layout.sizes.world == question.devices for one in found)


@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 2, "pp": 4},
        {"dp_shard": 4, "recompute": "full"},
        {"cp": 2, "cp_method": "ring", "micro_batch": 2},
        {"schedule": "gpipe"},
        {"tp": 16},  # beyond a domain of 8
    ],
    ids=str,
)
def test_what_the_run_file_names_is_kept(mesh: dict[str, Any]) -> None:
    model = "llama2-7b" if mesh.get("tp") == 16 else "llama3-8b"  # 32 heads of keys
    found = search(asked(model, 32, 128, "h200", **mesh), 10)
    assert found
    for one in found:
        said = {**vars(one.layout.sizes), **vars(one.layout), "recompute": one.recompute}
        assert {name: said[name] for name in mesh} == mesh


def test_no_number_is_legal_where_none_can_be() -> None:
    assert search(asked("llama3-8b", 37, 64)) == []
    assert search(asked("llama3-8b", 8, 8, micro_batch=3)) == []


LARGE = [("llama3-70b", 16_384), ("qwen3-235b-a22b", 1024)]


@pytest.mark.parametrize(("model", "devices"), some_slow(LARGE, slow=LARGE[1:]))
def test_a_large_cluster_is_searched_in_under_10_seconds(model: str, devices: int) -> None:
    question = asked(model, devices, devices)
    began = time.process_time()  # one thread, so that it is what a quiet machine takes
    found = search(question)
    took = time.process_time() - began
    print(f"{model} on {devices:,} devices: {took:.1f} s")
    assert found[0].fits
    assert took < 10


def test_what_does_not_fit_is_refused_with_the_cheapest_change_that_makes_it_fit() -> None:
    whole = asked("llama3-8b", 8, 64, recompute="none", dp_shard=8, micro_batch=8)
    least = search(whole, 1)[0]
    assert not least.fits
    said = make_it_fit(whole, least)
    assert "needs" in said
    assert "with the mesh left open" in said
    alone = asked("llama3-8b", 1, 64)
    said = make_it_fit(alone, search(alone, 1)[0])
    assert "2 devices do, with" in said
    never = asked("llama3.1-405b", 1, 4, "t4")
    assert "take a device with more memory, or a smaller model" in make_it_fit(never, search(never, 1)[0])


def test_how_many_are_shown_does_not_change_which_is_best() -> None:
    question = asked("llama3-8b", 64, 1024, seq=8192)
    assert search(question, 1)[0] == search(question, 5)[0] == search(question, 30)[0]


def test_a_better_machine_is_no_slower_and_changes_are_told() -> None:
    question = asked("llama3-8b", 64, 512, seq=8192)
    best = search(question, 5)
    wider = replace(question, machine=replace(question.machine, memory=2 * question.machine.memory))
    assert search(wider, 1)[0].seconds <= best[0].seconds * 1.021
    told = list(changes(question, best[0]))
    assert [line.split(":")[0] for line in told] == [
        "twice the memory",
        "twice the network between nodes",
        "half the network between nodes",
        "twice the batch",
        "train.compile",
    ]
    assert "faster than" in against(best[0], best[-1])


def test_scaling_falls_with_a_fixed_batch_more_than_with_one_that_grows() -> None:
    ethernet = Machine.of(find("h100"), find_fabric("ethernet", find("h100")))
    question = replace(asked("llama3-8b", 64, 512), machine=ethernet)
    fixed, grows = strong(question, [8, 64, 512]), weak(question, [8, 64, 512])
    assert [p.batch for p in fixed] == [512] * 3
    assert [p.batch for p in grows] == [64, 512, 4096]
    assert fixed[2].tokens_s.expected < grows[2].tokens_s.expected < grows[0].tokens_s.expected
    assert fixed[1].tokens_s == grows[1].tokens_s
    assert numbers([64]) == [8, 16, 32, 64, 128, 256, 512]
    assert numbers([8, 48]) == [8, 16, 32, 48]
    assert numbers([3]) == [3, 6, 12, 24]


@pytest.mark.parametrize("devices", [1, 2, 8, 12, 512, 16_384])
def test_any_number_of_devices_has_a_verdict(devices: int) -> None:
    question = asked("llama3.2-1b", devices, 12 * devices)
    found = search(question, 1)[0]
    said = verdict(question, find("h100"), found, preset("llama3"), style("supervised"), 2.0)
    assert 0 < said.mfu < said.mfu_whole < 1
    assert 0.5 < said.goodput.expected <= 1
    assert said.usd is not None
    assert said.usd.expected == pytest.approx(said.days.expected * 24 * 2.0 * devices)
    for figure in (said.tokens_s, said.days, said.usd):
        assert 0 < figure.low < figure.expected < figure.high


def test_intervals_that_are_wrong_for_different_reasons_add_up_by_squares() -> None:
    speed, share = Range(80.0, 100.0, 110.0), Range(0.5, 1.0, 1.0)
    both = speed.by(share)
    assert both.expected == 100
    assert both.high == pytest.approx(110)
    assert 100 * 0.5 * 0.8 < both.low < 50


def test_gradients_are_scattered_with_each_micro_batch_where_whole_ones_do_not_fit() -> None:
    """8B has 32 GB of gradients: whole, they do not fit beside the rest; with room for them they travel once."""
    tight: dict[str, Any] = {"pp": 1, "tp": 1, "cp": 1}
    best = search(asked("llama3-8b", 8, 256, "a100-40gb", 4096, **tight))[0]
    assert (best.layout.reduce, best.fits) == ("micro_batch", True)
    assert "reduce micro_batch" in words(best.layout, best.recompute)
    assert not search(asked("llama3-8b", 8, 256, "a100-40gb", 4096, **tight, reduce="step"))[0].fits
    ways = ("auto", "micro_batch")
    roomy = [search(asked("qwen2.5-0.5b", 8, 256, "h200", 4096, **tight, reduce=way))[0] for way in ways]
    assert roomy[0].layout.reduce == "step"
    assert roomy[0].seconds < roomy[1].seconds
    assert roomy[1].parts["data"] > roomy[0].parts["data"]
    assert not search(asked("llama3-8b", 8, 256, "h200", 4096, pp=8, reduce="micro_batch"))  # it has no meaning there


def test_in_8_bits_no_layout_is_found_that_the_trainer_refuses() -> None:
    """`shoal.spec.eight_bits` has no tensor parallelism, and wants widths of whole sixteens."""
    wide = asked("llama3-70b", 64, 64)
    assert {layout.sizes.tp for layout in layouts(wide)} > {1}
    assert {layout.sizes.tp for layout in layouts(_in_8_bits(wide))} == {1}
    odd = replace(wide, shape=replace(wide.shape, ffn_dim=28680))
    assert list(layouts(odd))
    assert not list(layouts(_in_8_bits(odd)))


def _in_8_bits(asked_for: Asked) -> Asked:
    train = asked_for.run.train.model_copy(update={"precision": "fp8"})
    return replace(asked_for, run=asked_for.run.model_copy(update={"train": train}))
