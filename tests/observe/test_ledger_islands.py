"""What the loss of an island costs the others, who did not restart."""

from __future__ import annotations

import pytest

from shoal.observe.advice import advice
from shoal.observe.history import history
from shoal.observe.time_ledger import Ledger, ledger
from tests.observe.islands import Fleet


def accounts(fleet: Fleet) -> Ledger:
    found = ledger(fleet.close().records)
    assert sum(found.parts_us.values()) == found.total_us
    return found


def test_a_killed_island_costs_the_gap_beyond_the_usual_step() -> None:
    """Killed 0.4 s into a step, noticed 0.1 s later; the survivors end that step 0.9 s later than usual."""
    fleet = Fleet().open().take(10)
    began = fleet.t
    fleet.t += 0.5
    fleet.begin_epoch({"2": "closed its connection"}, noticed=began + 0.5)
    fleet.failure(2, at=began + 0.4)
    fleet.t = began
    fleet.take(seconds=1.9).take(9)
    found = accounts(fleet)
    (cost,) = found.costs
    assert (cost.fault.cause, cost.fault.island, cost.lost_steps) == ("killed", 2, 0)
    assert cost.detection_us == pytest.approx(100_000, abs=5)
    assert cost.recovery_us == pytest.approx(800_000, abs=5)
    assert found.seconds("training") == pytest.approx(20)
    assert found.seconds("lost") == 0
    assert found.seconds("startup") == pytest.approx(5)


def test_a_stopped_island_is_accounted_for_from_the_last_sign_of_life() -> None:
    """Nobody saw it happen: from the end of the last step until it was noticed, 3 s later, but for one usual step."""
    fleet = Fleet().open().take(10)
    began = fleet.t
    fleet.t += 3.0
    fleet.begin_epoch({"1": "was silent for 3 s"}, noticed=began + 3.0)
    fleet.take(seconds=1.0, begin=began)
    fleet.take(9)
    found = accounts(fleet)
    (cost,) = found.costs
    assert (cost.fault.cause, cost.fault.island) == ("network", 1)
    assert cost.detection_us == pytest.approx(3_000_000, abs=5)
    assert cost.recovery_us == 0
    assert found.seconds("training") == pytest.approx(20)


def test_coming_back_costs_what_the_others_waited_and_belongs_to_the_fault() -> None:
    fleet = Fleet().open().take(10)
    fleet.failure(0, at=fleet.t).begin_epoch({"0": "closed its connection"}, noticed=fleet.t)
    fleet.take(seconds=1.2).take(9)
    fleet.begin_epoch(joined=(0,)).take(seconds=1.5).take(9)
    found = accounts(fleet)
    (cost,) = found.costs
    assert cost.detection_us == 0
    assert cost.recovery_us == pytest.approx(700_000, abs=5)
    assert found.seconds("training") == pytest.approx(30)


def test_fewer_islands_take_longer_and_that_is_training() -> None:
    """Survivors compute more shards each: 1.5 s a step is what a step of two islands usually takes."""
    fleet = Fleet().open().take(10)
    fleet.failure(2, at=fleet.t).begin_epoch({"2": "closed its connection"}, noticed=fleet.t)
    fleet.take(seconds=2.0).take(10, seconds=1.5)
    found = accounts(fleet)
    assert found.costs[0].total_us == pytest.approx(500_000, abs=5)
    assert found.seconds("training") == pytest.approx(10 + 11 * 1.5)


def test_a_step_that_is_told_twice_counts_once_and_as_it_was_told_first() -> None:
    fleet = Fleet().open().take(10)
    fleet.begin_epoch({"0": "was silent"}, noticed=fleet.t).take()
    fleet.tell_step(10, begin=fleet.t - 2)  # the stopped first member wakes up and writes what it had done
    fleet.take(5)
    found = accounts(fleet)
    assert found.seconds("lost") == 0
    assert found.seconds("training") == pytest.approx(16)
    told = history(fleet.records)
    assert len(told.steps) == 16
    assert len(told.lost) == 0
    assert told.steps.column("epoch")[9] == 1


def test_when_all_islands_die_the_steps_since_the_checkpoint_are_lost_to_the_last_of_them() -> None:
    fleet = Fleet().open().take(10)
    fleet.t += 0.1
    fleet.failure(0, at=fleet.t).failure(1, at=fleet.t).failure(2, at=fleet.t)
    fleet.t += 6
    fleet.life, fleet.step = 2, 4
    fleet.write("start", attempt=2, step=4, world=1, total=100)
    fleet.begin_epoch(joined=(0, 1, 2)).take(10)
    found = accounts(fleet)
    assert found.seconds("lost") == pytest.approx(6)
    assert found.seconds("training") == pytest.approx(14)
    assert found.seconds("recovery") + found.seconds("detection") == pytest.approx(6.1)
    assert [cost.lost_steps for cost in found.costs] == [0, 0, 6]
    assert sum(cost.total_us for cost in found.costs) == pytest.approx(12_100_000, abs=10)


def test_the_advice_for_islands_names_the_class_that_costs_most() -> None:
    fleet = Fleet().open().take(10)
    for cause, late in (("killed", 0.5), ("hang", 4.0)):
        fleet.failure(1, cause, at=fleet.t).begin_epoch({"1": "gone"}, noticed=fleet.t).take(seconds=1 + late)
        fleet.take(5).begin_epoch(joined=(1,)).take(5)
    said = advice(accounts(fleet), history(fleet.records))
    assert said is not None
    assert said.part == "recovery"
    assert said.saves_s == pytest.approx(4.0, abs=1e-3)
    assert said.sentence.startswith("2 failures cost ")
    assert "docs/runbooks/hang.md" in said.sentence
