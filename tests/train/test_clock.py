"""A device that works behind the host: phases are its own, and nobody waits to learn them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.journal.pulse import SILENT, Pulse
from shoal.journal.pulse_file import read_beat
from shoal.train.clock import MOST_BLOCKS, Clock, Timeline


class Device:
    """A queue of work with a clock of its own. Marks are passed when the work before them is done."""

    def __init__(self) -> None:
        self.done_s = 0.0  # of the last work that was given to it
        self.host_s = 0.0
        self.marks = 0
        self.waits = 0

    def work(self, seconds: float) -> None:
        self.done_s = max(self.done_s, self.host_s) + seconds

    def wait(self) -> None:
        """What reading the loss does."""
        self.waits += 1
        self.host_s = max(self.host_s, self.done_s)

    def mark(self) -> Mark:
        self.marks += 1
        return Mark(self)


class Mark:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, -1.0

    def record(self) -> None:
        self.at_s = max(self.device.done_s, self.device.host_s)

    def query(self) -> bool:
        return self.at_s <= self.device.host_s

    def elapsed_time(self, end_event: Mark) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("both events must be completed")  # as torch says it
        return 1e3 * (end_event.at_s - self.at_s)

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for a mark")


def one_step(device: Device, timeline: Timeline, step: int, micro_batches: int = 2, data_s: float = 0.0) -> Clock:
    """As the loop does it: the host gives work away in no time, and waits where it reads the loss."""
    clock = Clock(SILENT, step, timeline)
    device.host_s += data_s
    clock.lap("data_s", then="exchange")
    for _ in range(micro_batches):
        clock.mark("forward")
        device.work(0.1)
        clock.mark("backward")
        device.work(0.2)
    clock.mark("clip")
    device.work(0.01)
    device.wait()
    clock.lap("compute_s", then="optimizer")
    device.work(0.05)
    clock.lap("optimizer_s", then="record")
    return clock


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def timeline(device: Device) -> Timeline:
    return Timeline(device.mark)


def test_phases_are_the_devices_and_come_a_step_later(device: Device, timeline: Timeline) -> None:
    first = one_step(device, timeline, 0).fields()
    assert "device" not in first  # its optimizer is still at work
    second = one_step(device, timeline, 1, data_s=0.02).fields()
    assert second["device"] == pytest.approx(
        {"step": 1, "wait_s": 0, "forward_s": 0.2, "backward_s": 0.4, "clip_s": 0.01, "optimizer_s": 0.05}
    )
    third = one_step(device, timeline, 2).fields()
    # The host was away for 20 ms, while the device was busy with the optimizer: it has not waited.
    assert third["device"]["step"] == 2
    assert third["device"]["wait_s"] == pytest.approx(0.0)


def test_a_device_that_has_nothing_to_do_waits_for_the_host(device: Device, timeline: Timeline) -> None:
    one_step(device, timeline, 0).fields()
    one_step(device, timeline, 1, data_s=0.55).fields()
    assert one_step(device, timeline, 2).fields()["device"]["wait_s"] == pytest.approx(0.5)


def test_the_phases_add_up_to_the_steps_of_the_device(device: Device, timeline: Timeline) -> None:
    told = [one_step(device, timeline, step, data_s=0.1).fields().get("device", {}) for step in range(20)]
    spent = [sum(seconds for name, seconds in phases.items() if name != "step") for phases in told[1:]]
    assert [phases["step"] for phases in told[1:]] == list(range(1, 20))
    # 100 ms of the host's, half of which the device spends on the optimizer of the step before, and 610 + 50 of work.
    assert spent == pytest.approx([0.76] + 18 * [0.71])


def test_no_wait_is_added_and_marks_are_used_again(device: Device, timeline: Timeline) -> None:
    for step in range(100):
        one_step(device, timeline, step, micro_batches=8).fields()
    assert device.waits == 100  # one each, where the loss is read
    assert device.marks <= 3 * (2 * 8 + 4)


def test_marks_that_are_not_passed_are_left_out_not_waited_for(device: Device, timeline: Timeline) -> None:
    one_step(device, timeline, 0)
    clock = one_step(device, timeline, 1)
    device.work(1.0)
    ahead = device.host_s
    device.host_s = -1.0  # nothing has been passed yet
    assert "device" not in clock.fields()
    device.host_s = ahead
    assert clock.fields()["device"]["step"] == 1


def test_a_step_that_came_to_nothing_leaves_no_phases(device: Device, timeline: Timeline) -> None:
    clock = Clock(SILENT, 0, timeline)
    clock.mark("forward")
    device.work(5.0)
    device.wait()
    one_step(device, timeline, 0).fields()  # the same step, with another batch
    phases = one_step(device, timeline, 1).fields()["device"]
    assert phases["step"] == 1
    assert phases["forward_s"] == pytest.approx(0.2)


def test_an_island_waits_for_data_more_than_once_in_a_step(device: Device, timeline: Timeline) -> None:
    def shard(clock: Clock) -> None:
        clock.mark("data")
        device.host_s += 0.1
        clock.mark("forward")
        device.work(0.1)
        device.wait()

    def step(number: int) -> Clock:
        clock = Clock(SILENT, number, timeline)
        clock.mark("trade")
        for act in [shard, shard]:
            act(clock)
        clock.mark("trade")
        device.host_s += 0.3
        clock.mark("optimizer")
        device.work(0.05)
        clock.lap("optimizer_s", then="record")
        device.wait()
        return clock

    phases = step(0).fields()["device"]
    assert phases == pytest.approx({"step": 1, "trade_s": 0.3, "wait_s": 0.2, "forward_s": 0.2, "optimizer_s": 0.05})


def blocks(device: Device, timeline: Timeline, count: int, waits_s: float = 0.0) -> None:
    """Each waits for its weights, which others bring, and then computes for 10 ms."""
    for _ in range(count):
        timeline.enter()
        device.work(waits_s)
        timeline.gathered()
        device.work(0.01)
        timeline.leave()


def a_step_of_blocks(device: Device, timeline: Timeline, step: int, count: int, waits_s: float) -> None:
    clock = Clock(SILENT, step, timeline)
    clock.mark("forward")
    blocks(device, timeline, count, waits_s)
    clock.mark("clip")
    device.work(5.0)  # in collectives
    device.wait()
    clock.lap("compute_s", then="record")
    device.wait()
    clock.fields()


@pytest.mark.parametrize("waits_s", [0.0, 3.0])
@pytest.mark.parametrize("count", [4, 64, 500])
def test_a_devices_own_work_is_that_of_its_blocks_without_what_they_wait_for(
    device: Device, timeline: Timeline, count: int, waits_s: float
) -> None:
    for step in range(3):
        a_step_of_blocks(device, timeline, step, count, waits_s)
        assert timeline.own_s == pytest.approx(count * 0.01)
        blocks(device, timeline, 7)  # an evaluation: no step
    assert device.marks <= 2 * 2 * MOST_BLOCKS + 20  # however many blocks there are


def test_the_pulse_tells_the_median_of_the_devices_own_work(device: Device, timeline: Timeline, tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, 0)
    for step, count in enumerate((1, 900, 2, 3, 4, 800, 5)):  # two steps were held up
        clock = Clock(pulse, step, timeline)
        blocks(device, timeline, count)
        clock.mark("record")
        device.wait()
        clock.fields()
        beat = read_beat(tmp_path, 0)
        assert beat is not None
        assert (beat.device_s < 0) == (step < 4), "known from the fifth step on"
    assert beat.device_s == pytest.approx(0.04)


def test_without_a_device_the_hosts_clock_is_all_there_is() -> None:
    clock = Clock(SILENT, 0, None)
    clock.mark("forward")
    clock.lap("compute_s", then="record")
    assert set(clock.fields()) == {"time"}


_: Callable[[], Mark] = Device().mark  # a Mark is what a Timeline takes
