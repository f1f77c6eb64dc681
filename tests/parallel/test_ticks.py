"""Whether a device gets on is seen from marks that it passes: here the device is a count, on a GPU see tests/gpu."""

from __future__ import annotations

import torch

from shoal.journal.pulse_file import Device
from shoal.model.decoder import Decoder
from shoal.parallel.ticks import MOST, Ticks, ticks_of
from shoal.spec.model import Model
from shoal.spec.shape import shape_of


class Queue:
    """A device that has `ahead` marks' worth of work before it."""

    def __init__(self) -> None:
        self.passed, self.put, self.ahead = 0, 0, 1

    def mark(self) -> Mark:
        self.put += 1
        return Mark(self, self.put)


class Mark:
    def __init__(self, queue: Queue, number: int = 0) -> None:
        self._queue, self._number = queue, number

    def record(self) -> None:
        self._queue.put += 1
        self._number = self._queue.put

    def query(self) -> bool:
        return self._queue.ahead == 0 or self._queue.passed >= self._number


def test_a_device_that_works_off_its_queue_ticks_and_one_that_hangs_does_not() -> None:
    queue = Queue()
    ticks = Ticks(lambda: Mark(queue), queue.mark, lambda s: None)
    assert [ticks() for _ in range(3)] == [Device(0, queued=True)] * 3  # it does not get on
    assert queue.put == 1  # and nothing more is put into its queue
    for n in range(1, 4):
        queue.passed = queue.put
        assert ticks() == Device(n, queued=True)


def test_a_device_without_work_does_not_tick() -> None:
    """A rank that sleeps on the host has an idle device: that is no work."""
    queue = Queue()
    queue.ahead = 0
    ticks = Ticks(lambda: Mark(queue), queue.mark, lambda s: None)
    assert [ticks() for _ in range(5)] == [Device(0, queued=False)] * 5
    queue.ahead = 1
    assert ticks() == Device(0, queued=True)


def test_a_host_that_has_queued_a_whole_step_sees_the_device_pass_each_block_forwards_and_backwards() -> None:
    queue = Queue()
    ticks = Ticks(lambda: Mark(queue), queue.mark, lambda s: None)
    shape = shape_of(Model(vocab_size=32, dim=16, layers=3, heads=2, ffn_dim=32))
    decoder = Decoder(shape)
    decoder.init_weights(0)
    decoder.passes = ticks.passes
    tokens = torch.zeros(1, 8, dtype=torch.long)
    decoder(tokens, targets=tokens).backward()
    assert queue.put == 2 * shape.layers
    assert ticks() == Device(0, queued=True)
    for n in range(2 * shape.layers + 1):  # the last one is behind all
        queue.passed = n
        assert ticks() == Device(n, queued=True)
    with torch.no_grad():
        decoder(tokens)
    assert queue.put == 3 * shape.layers + 1


def test_a_device_that_hangs_is_given_a_bounded_number_of_marks() -> None:
    queue = Queue()
    ticks = Ticks(lambda: Mark(queue), queue.mark, lambda s: None)
    for _ in range(3 * MOST):
        ticks.passes(torch.zeros(1))
    assert queue.put == MOST
    queue.passed = MOST
    assert ticks().ticks == MOST
    made = queue.put
    for _ in range(3):
        ticks.passes(torch.zeros(1))
    assert ticks().ticks == MOST
    assert queue.put == made + 3  # there is room again


def test_on_a_cpu_there_is_nothing_to_ask() -> None:
    assert ticks_of(torch.device("cpu")) is None
