"""The time of a step: what must hold whatever its constants are."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from shoal.plan.asked import TRAINER
from shoal.plan.case import Case, Cases, Plan
from shoal.plan.catalogue import devices, find, find_fabric
from shoal.plan.constants import Constants, fitted
from shoal.plan.footprint import footprint
from shoal.plan.machine import Machine
from shoal.plan.net import Net
from shoal.plan.software import Attention, Software
from shoal.plan.step import Parts, Shared, step, tokens_per_second
from shoal.plan.traffic import step_of, traffic
from shoal.spec.mesh import Sizes
from shoal.spec.shape import shape_of
from tests.plan.asked import H100, LLAMA_8B, case
from tests.plan.runs import closed

MIXTURE = Net(32, 4096, 32, 8, 128, 14336, 3, 32000, False, experts=8, top_k=2, expert_dim=14336)
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"zero": 3},
    {"tp": 8},
    {"tp": 4, "pp": 4, "chunks": 2},
    {"pp": 8},
    {"cp": 4, "zero": 3},
    {"tp": 2, "pp": 2, "cp": 2, "recompute": 1.0},
    {"micro_batch": 4, "recompute": 0.2},
]


def parts(one: Case, c: Constants | None = None) -> dict[str, float]:
    return step(Cases.of([one]), c or fitted()).of(0)


def seconds(one: Case, c: Constants | None = None) -> float:
    return sum(parts(one, c).values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_are_no_less_than_nothing_and_sum_to_the_total(layout: dict[str, Any]) -> None:
    found = step(Cases.of([case(**layout)]), fitted())
    assert all(getattr(found, f.name)[0] >= 0 for f in fields(Parts))
    assert sum(found.of(0).values()) == pytest.approx(float(found.total[0]))


def test_a_case_is_as_fast_alone_as_in_a_column_with_others() -> None:
    cases = [case(**layout) for layout in LAYOUTS]
    cases += [case(net=MIXTURE, ep=8, zero=3), case(precision="fp8"), case(Machine.of(find("v100")), seq=1024)]
    together = tokens_per_second(Cases.of(cases), fitted())
    alone = [float(tokens_per_second(Cases.of([one]), fitted())[0]) for one in cases]
    assert together.tolist() == pytest.approx(alone, rel=1e-12)
    spread = step(Cases.spread(case(), {"micro_batch": np.array([1.0, 4.0])}), fitted()).total
    assert spread.tolist() == pytest.approx([seconds(case()), seconds(case(micro_batch=4))])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("better", ["matmul", "bandwidth", "link", "nic"])
def test_a_machine_that_is_better_in_one_thing_is_never_slower(better: str, layout: dict[str, Any]) -> None:
    more = replace(H100, **{better: 2 * getattr(H100, better)})
    if better == "link":
        more = replace(more, per_peer=2 * H100.per_peer)
    assert seconds(case(more, **layout)) <= seconds(case(**layout)) * (1 + 1e-12)


def test_what_is_not_used_costs_nothing() -> None:
    alone = parts(case(devices=1, batch=4))
    assert all(alone[name] == 0 for name in ("tensor", "context", "experts", "pipeline", "handover", "data", "waiting"))
    assert parts(case(pp=8))["tensor"] == parts(case(tp=8))["pipeline"] == parts(case(tp=8))["context"] == 0
    assert parts(case(tp=8))["tensor"] > 0
    assert parts(case(pp=8))["pipeline"] > 0
    assert parts(case(recompute=0.0))["recompute"] == 0


def test_recomputing_costs_time_and_saves_memory() -> None:
    modes = [case(recompute=again) for again in (0.0, 0.3, 1.0)]
    times = [seconds(one) for one in modes]
    memory = footprint(Cases.of(modes)).total
    assert times == sorted(times)
    assert list(memory) == sorted(memory, reverse=True)
    assert times[2] / times[0] < 4 / 3 + 0.01  # the forward pass is a third of a step without it
    assert memory[2] < 0.8 * memory[0]


def test_more_micro_batches_and_more_pieces_a_device_fill_a_pipeline() -> None:
    waits = []
    for batch in (16, 64, 256, 1024):
        one = parts(case(devices=8, pp=8, batch=batch, software=TRAINER))
        waits.append(one["pipeline"] / sum(one.values()))
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 0.3 > 0.15 > waits[-1]  # what is left is the last stage's head, by half a layer
    pieces = [parts(case(devices=8, pp=8, batch=16, chunks=n, software=TRAINER))["pipeline"] for n in (1, 2, 4)]
    assert pieces == sorted(pieces, reverse=True)
    uncut = replace(TRAINER, balances=False)
    assert parts(case(pp=8, software=uncut))["pipeline"] > parts(case(pp=8, software=TRAINER))["pipeline"]


def test_twice_the_batch_takes_less_than_twice_as_long_and_weak_scaling_costs_little() -> None:
    once, twice = seconds(case(batch=256)), seconds(case(batch=512))
    assert 1.8 * once < twice <= 2 * once
    many = seconds(case(devices=1024, batch=256 * 16))
    assert once < many < 1.1 * once


def test_gradients_that_are_reduced_once_a_step_are_seen_on_a_slow_network_only() -> None:
    slow = Machine.of(find("h100"), find_fabric("ethernet", find("h100")))
    shared = {"zero": 3, "shard": 8, "batch": 512, "software": TRAINER}
    on_ib, on_ethernet = (parts(case(machine, **shared)) for machine in (H100, slow))
    assert on_ib["data"] < 0.05 * sum(on_ib.values())
    assert on_ethernet["data"] > 0.2 * sum(on_ethernet.values())
    # Weights that are fetched for every micro-batch hide behind all of them; gradients behind the last one alone.
    hidden = replace(TRAINER, gathers_once=False)
    assert parts(case(slow, **(shared | {"software": hidden})))["data"] < on_ethernet["data"]


def test_software_makes_a_difference_where_it_should() -> None:
    assert seconds(case(software=Software(2024.5, Attention.FLASH))) > seconds(case())
    assert seconds(case(software=Software(2024.5, fused=False))) > seconds(case())
    assert seconds(case(tp=8)) > seconds(case(tp=8, software=Software(2024.5, hides_tp=True)))
    assert seconds(case(software=Software(2022.9))) > seconds(case(software=Software(2026.0)))
    assert seconds(case(precision="fp8")) < seconds(case())


def test_experts_cost_what_they_compute_and_what_travels() -> None:
    dense = replace(LLAMA_8B, vocab=32000)
    mixture = parts(case(net=MIXTURE, ep=8, zero=3))
    plain = parts(case(net=dense, zero=3))
    assert 1.5 < mixture["products"] / plain["products"] < 3  # two experts of the size of one feed-forward, unevenly
    assert mixture["experts"] > 0 == plain["experts"]
    assert parts(case(net=MIXTURE, ep=8, zero=3, hidden_ep=True))["experts"] < mixture["experts"]


def test_every_device_of_the_catalogue_has_a_time() -> None:
    cases = [case(Machine.of(device), devices=device.per_node, batch=device.per_node) for device in devices()]
    found = tokens_per_second(Cases.of(cases), fitted())
    assert np.isfinite(found).all()
    assert (found > 0).all()


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("sizes", [Sizes(cp=2), Sizes(cp=4, tp=2), Sizes(dp_shard=2, cp=4)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_shared_sequence_sends_is_what_the_trainer_counts(sizes: Sizes, method: str, precision: str) -> None:
    """`shoal.plan.traffic` is held equal to the trainer's counters (tests/parallel/test_count.py); so this is too."""
    model = {"vocab_size": 512, "dim": 256, "layers": 4, "heads": 8, "kv_heads": 8, "ffn_dim": 512}
    mesh = {"cp_method": method, "micro_batch": 2, "recompute": "none", **vars(sizes)}
    run = closed(model, **{f"mesh.{k}": v for k, v in mesh.items()}, **{"train.batch": 8, "train.precision": precision})
    shape = shape_of(run.model)
    counted = sum(size for (axis, _), (_, size) in traffic(step_of(run, shape)).items() if axis == "cp")
    one = Case(
        Net.of(shape),
        H100,
        TRAINER,
        Plan(tp=sizes.tp, cp=sizes.cp, micro_batch=2, all_to_all=method == "all_to_all"),
        sizes.world,
        8,
        run.data.seq_len,
        precision,
    )
    cases = Cases.of([one])
    sent = Shared.of(cases)
    device = float((sent.forward + sent.backward)[0]) * shape.layers * float(cases.micro_batches[0])
    assert device * sizes.world == pytest.approx(counted)


def test_a_ring_sends_less_for_few_heads_of_keys_and_an_exchange_over_many_processes() -> None:
    """8 heads of keys for 32 of queries; a ring's traffic grows with its processes, and merging does too."""
    for seq in (4096, 131_072):
        ways = {
            (cp, way): parts(case(cp=cp, batch=64, seq=seq, software=TRAINER, all_to_all=way))["context"]
            for cp in (2, 8)
            for way in (False, True)
        }
        assert ways[2, False] < ways[2, True]
        assert ways[8, True] < ways[8, False]
