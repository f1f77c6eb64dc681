"""Who computes what: pure functions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from shoal.stages.routes import Commit, Plan, dealt, enough, rerouted
from shoal.values import BadValue

STAGES = [["a"], ["b", "c"], ["d", "e", "f"]]


def test_micro_batches_go_to_peers_as_often_as_they_are_fast() -> None:
    routes = dealt(12, STAGES, {"b": 1.0, "c": 3.0, "d": 1.0, "e": 1.0})  # f is not measured: as fast as the fastest
    assert Counter(route[1] for route in routes) == {"b": 9, "c": 3}
    assert Counter(route[2] for route in routes) == {"d": 4, "e": 4, "f": 4}
    assert {route[0] for route in routes} == {"a"}


def test_only_what_a_lost_peer_had_moves() -> None:
    routes = dealt(12, STAGES, {})
    after = rerouted(routes, STAGES, ["e"], {"d": 1.0, "f": 2.0})
    for before, now in zip(routes, after, strict=True):
        assert now[:2] == before[:2]
        assert now[2] == before[2] if before[2] != "e" else now[2] in ("d", "f")
    assert Counter(r[2] for r in after)["d"] > Counter(r[2] for r in after)["f"]


def test_two_halves_never_both_go_on() -> None:
    members = ("a", "b", "c", "d")
    assert enough(members, "abc")
    assert enough(members, "ad")  # half, with the first
    assert not enough(members, "bc")
    assert not enough(members, "")


def test_a_plan_is_the_same_after_it_has_travelled() -> None:
    a, b, c = ("a" * 64, "b" * 64, "c" * 64)
    plan = Plan(2, 7, 1, 5, (a, b), ((a, b),), {c: b}, Commit(4, 0.5, 1.0, 2.0), a)
    assert Plan.of_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.fits(((a,), (b, c)), 1, 9)
    assert not plan.fits(((a,), (b, c)), 2, 9)  # another number of micro-batches
    assert not plan.fits(((b,), (a, c)), 1, 9)  # each in another stage
    assert not replace(plan, lead="d" * 64).fits(((a,), (b, c)), 1, 9)


def test_a_lead_cannot_go_beyond_the_last_step_nor_turn_or_blow_up_a_gradient() -> None:
    a, b = ("a" * 64, "b" * 64)
    plan = Plan(2, 7, 1, 5, (a, b), ((a, b),), {}, Commit(4, 0.5, 1.0, 2.0), a)
    assert plan.fits(((a,), (b,)), 1, 5)
    assert not plan.fits(((a,), (b,)), 1, 4)
    assert not replace(plan, commit=Commit(3, 0.5, 1.0, 2.0)).fits(((a,), (b,)), 1, 5)  # of another step
    for factor in (-0.5, 1.5, 1e300):
        with pytest.raises(BadValue):
            Plan.of_json(replace(plan, commit=Commit(4, factor, 1.0, 2.0)).to_json())
