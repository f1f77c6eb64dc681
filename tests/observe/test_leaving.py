"""An island that leaves because it was told to: a fault of one, none when all are told; and how it is said live."""

from __future__ import annotations

from typing import Any

from shoal.observe.faults import faults_of
from shoal.observe.follow import sentence

LEFT = {"kind": "epoch", "t": 12.0, "number": 2, "noticed": 11.9, "step": 7, "members": [0, 2], "left": {"1": "left"}}


def told(*kinds: str) -> list[dict[str, Any]]:
    return [{"kind": kind, "t": 10.0 + i / 10} for i, kind in enumerate(kinds)]


def test_one_that_is_told_to_leave_is_a_fault_of_the_class_preempted() -> None:
    (fault,) = faults_of([*told("open", "attempt"), {**LEFT, "joined": []}])
    assert (fault.cause, fault.island) == ("preempted", 1)


def test_when_all_are_told_nobody_has_failed() -> None:
    assert faults_of([*told("open", "attempt", "stopping"), {**LEFT, "joined": []}]) == []
    assert len(faults_of([*told("open", "stopping", "open"), {**LEFT, "joined": []}])) == 1  # another session


def test_whoever_was_lost_is_a_fault_also_while_the_run_stops() -> None:
    lost = {**LEFT, "joined": [], "left": {"1": "closed its connection"}}
    (fault,) = faults_of([*told("open", "stopping"), lost])
    assert fault.cause == "network"


def test_it_is_said_who_left_and_who_came() -> None:
    assert sentence({**LEFT, "joined": [3]}, "x") == (
        "step 7: island 1 is gone (left), island 3 has joined; in the fleet: 0, 2"
    )
    assert sentence({**LEFT, "number": 1, "left": {}, "joined": [0, 1, 2]}, "x") is None  # the first one is the start
