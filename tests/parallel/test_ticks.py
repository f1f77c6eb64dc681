"""Whether a device gets on is seen from marks that it passes: here the device is a list, on a GPU see tests/gpu."""

from __future__ import annotations

import torch

from shoal.observe.pulse import Device
from shoal.parallel.ticks import Ticks, ticks_of


class Queue:
    """A device that has `ahead` marks' worth of work before it."""

    def __init__(self) -> None:
        self.passed, self.put, self.ahead = 0, 0, 1

    def mark(self) -> Mark:
        self.put += 1
        return Mark(self, self.put)


class Mark:
    def __init__(self, queue: Queue, number: int) -> None:
        self._queue, self._number = queue, number

    def query(self) -> bool:
        return self._queue.ahead == 0 or self._queue.passed >= self._number


def test_a_device_that_works_off_its_queue_ticks_and_one_that_hangs_does_not() -> None:
    queue = Queue()
    ticks = Ticks(queue.mark, lambda s: None)
    assert [ticks() for _ in range(3)] == [Device(0, queued=True)] * 3  # it does not get on
    assert queue.put == 1  # and nothing more is put into its queue
    for n in range(1, 4):
        queue.passed = queue.put
        assert ticks() == Device(n, queued=True)


def test_a_device_without_work_does_not_tick() -> None:
    """A rank that sleeps on the host has an idle device: that is no work."""
    queue = Queue()
    queue.ahead = 0
    ticks = Ticks(queue.mark, lambda s: None)
    assert [ticks() for _ in range(5)] == [Device(0, queued=False)] * 5
    queue.ahead = 1
    assert ticks() == Device(0, queued=True)


def test_on_a_cpu_there_is_nothing_to_ask() -> None:
    assert ticks_of(torch.device("cpu")) is None
