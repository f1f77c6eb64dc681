"""Pipelines: what each device does in turn is torch's own order, and how long that takes has closed forms."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import _ComputationType as Kind

from shoal.errors import SpecError
from shoal.plan.pipeline_schedule import SCHEDULES, Played, orders, play
from shoal.plan.stage_parts import in_flight
from shoal.spec.stages import stage_count, stages_of

SIZES = [(2, 4), (3, 6), (4, 8), (4, 10), (4, 16), (8, 16)]
LETTERS = {Kind.FORWARD: "F", Kind.FULL_BACKWARD: "B", Kind.BACKWARD_INPUT: "B", Kind.BACKWARD_WEIGHT: "W"}


def even(schedule: str, devices: int, count: int, handover: float = 0.0) -> Played:
    """A micro-batch takes each device one second forwards and two backwards, in one stage or in two."""
    stages = stage_count(devices, schedule)
    return play(schedule, devices, count, [devices / stages] * stages, [2 * devices / stages] * stages, handover)


class Stage:
    """What torch's schedules ask of a stage before they run it: no process group, no model."""

    device, group, submod, has_backward, stage_index_to_group_rank = "cpu", None, None, True, None

    def __init__(self, number: int, devices: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = number, 0, devices, 2 * devices
        self.is_first, self.is_last = number == 0, number == 2 * devices - 1


@pytest.mark.parametrize(
    ("schedule", "theirs"), [("interleaved", ScheduleInterleaved1F1B), ("zbv", ScheduleZBVZeroBubble)]
)
@pytest.mark.parametrize(("devices", "count"), SIZES)
def test_devices_do_their_work_in_torchs_own_order(schedule: str, theirs: Any, devices: int, count: int) -> None:
    stages = [Stage(number, devices) for number in stages_of(0, devices, schedule)]
    order = theirs(stages, count, loss_fn=lambda a, b: a).pipeline_order
    for device, ours in enumerate(orders(schedule, devices, count)):
        actions = [a for a in order[device] if a is not None and a.computation_type in LETTERS]
        assert list(ours) == [(LETTERS[a.computation_type], a.stage_index, a.microbatch_index) for a in actions]


@pytest.mark.parametrize(("devices", "count"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 64)])
def test_stages_that_cost_the_same_take_as_long_as_the_closed_forms_say(devices: int, count: int) -> None:
    work, idle = 3.0 * count, devices - 1
    assert even("gpipe", devices, count).seconds == pytest.approx(work + 3 * idle)
    assert even("1f1b", devices, count).seconds == pytest.approx(work + 3 * idle)
    assert even("interleaved", devices, count).seconds == pytest.approx(work + 3 * idle / 2)
    assert even("zbv", devices, count).seconds == pytest.approx(work + idle / 2)  # the last one's start alone
    for schedule in SCHEDULES:
        played = even(schedule, devices, count)
        assert played.busy == pytest.approx([work] * devices)
        assert played.idle == pytest.approx(1 - work / played.seconds)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("devices", "count"), SIZES)
def test_as_many_micro_batches_are_under_way_as_the_memory_plan_counts(schedule: str, devices: int, count: int) -> None:
    held = even(schedule, devices, count).under_way
    planned = [sum(in_flight(schedule, devices, rank, count)) for rank in range(devices)]
    assert all(seen <= plan <= seen + (schedule == "zbv") for seen, plan in zip(held, planned, strict=True))


def test_the_slowest_stage_sets_the_pace_and_a_hand_over_delays() -> None:
    slow = play("1f1b", 4, 32, [1, 1, 1.5, 1], [2, 2, 3, 2])
    assert 32 * 4.5 + 2 + 4 <= slow.seconds <= 32 * 4.5 + 3 * 3  # it waits for two forwards, two wait for it
    assert even("1f1b", 4, 8, handover=0.1).seconds >= even("1f1b", 4, 8).seconds + 6 * 0.1
    # In a "V" the two middle stages are on one device, and hand over nothing.
    assert even("zbv", 1, 4, handover=100.0).seconds == even("zbv", 1, 4).seconds


def test_more_devices_than_micro_batches_still_come_to_an_end() -> None:
    for schedule in SCHEDULES:
        assert even(schedule, 8, 3).seconds >= 9
    with pytest.raises((SpecError, KeyError)):
        play("nonsense", 2, 2, [1, 1], [1, 1])
