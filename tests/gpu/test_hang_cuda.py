"""A GPU that computes is seen to compute, and one that hangs is seen to hang, without anybody waiting for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from shoal.guard.hang import Hang, Limits, Watch
from shoal.journal.pulse import Pulse
from shoal.journal.pulse_file import PulseFolder, read_sample
from shoal.model.decoder import Decoder
from shoal.parallel.ticks import ticks_of
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from tests.guard.fake import until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


def cycles(seconds: float) -> int:
    """For a kernel that does nothing for so long."""
    device = torch.cuda.get_device_properties(0)
    return int(seconds * getattr(device, "clock_rate", 1_980_000) * 1e3)


def test_ticks_come_while_kernels_end_and_not_from_an_idle_device_or_an_endless_kernel() -> None:
    ticks = ticks_of(torch.device("cuda", 0))
    assert ticks is not None
    torch.cuda.synchronize()
    assert [ticks().ticks for _ in range(3)] == [0, 0, 0]
    seen = []
    for _ in range(20):  # a host that is a few kernels ahead of its device
        torch.cuda._sleep(cycles(0.15))
        seen.append(ticks())
        time.sleep(0.1)
    assert seen[-1].ticks > 0
    assert all(device.queued for device in seen[:5])
    torch.cuda.synchronize()
    ticks()
    before = ticks().ticks
    torch.cuda._sleep(cycles(3.0))
    stuck = [ticks() for _ in range(5) if not time.sleep(0.2)]
    assert {device.ticks for device in stuck} == {before}
    assert all(device.queued for device in stuck)
    torch.cuda.synchronize()


def test_a_pass_that_is_queued_as_a_whole_ticks_block_by_block() -> None:
    """Each block takes a tenth of a second by itself; the host has queued all of them long before. (No backward pass:
    with it there would be more kernels than a queue holds, and the host would wait.)"""
    device = torch.device("cuda", 0)
    decoder = Decoder(shape_of(Model(vocab_size=64, dim=64, layers=16, heads=2, ffn_dim=64))).to(device)
    decoder.init_weights(0)
    ticks = ticks_of(device, [decoder])
    assert ticks is not None
    tokens = torch.zeros(1, 16, dtype=torch.long, device=device)
    with torch.no_grad():
        decoder(tokens)  # what is set up the first time is not timed
        torch.cuda.synchronize()
        ticks()
        before = ticks().ticks
        for block in decoder.blocks.values():
            block.register_forward_pre_hook(lambda module, args: torch.cuda._sleep(cycles(0.1)))
        began = time.monotonic()
        decoder(tokens)
    assert time.monotonic() - began < 0.8, "the host did not run ahead: this test says nothing"
    seen = [ticks().ticks - before for _ in range(6) if not time.sleep(0.2)]
    torch.cuda.synchronize()
    assert len(set(seen)) >= 5
    assert seen == sorted(seen)
    assert seen[-1] < 16


@pytest.mark.parametrize("kernels", [200, 1], ids=["many kernels", "one kernel that does not end"])
def test_a_host_that_spins_in_a_wait_is_judged_by_its_device(tmp_path: Path, kernels: int) -> None:
    """The host asks all the time whether the device is done, so its CPU time says nothing."""
    import os
    import threading

    pulse = Pulse(tmp_path, 0)
    pulse.watch_device(ticks_of(torch.device("cuda", 0)))
    for step in range(5):
        for phase in ("data", "forward", "backward", "clip", "optimizer", "record"):
            pulse.mark(phase, step if phase == "data" else None)
    pulse.mark("data", 5)
    pulse.mark("clip")
    done = torch.cuda.Event()

    def keep_busy() -> None:
        """The next kernel is queued when the last one has ended."""
        if done.query():
            torch.cuda._sleep(cycles(20.0 / kernels))
            done.record()

    def seen_busy() -> bool:
        keep_busy()
        sample = read_sample(tmp_path, 0)
        return bool(sample and sample.device and sample.device.queued)

    until(seen_busy)
    watch, found, over = Watch({0: os.getpid()}, PulseFolder(tmp_path), Limits(quick_s=4.0)), list[Hang](), []

    def watching() -> None:
        while not over:
            if hang := watch.verdict(time.monotonic()):
                found.append(hang)
            time.sleep(0.1)

    thread = threading.Thread(target=watching)
    thread.start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # as CUDA waits
        keep_busy()
    over.append(True)
    thread.join()
    torch.cuda.synchronize()
    assert found
    assert {hang.works for hang in found} == {kernels > 1}
