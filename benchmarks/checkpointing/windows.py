"""Measures one save while the training goes on, against the same training left alone.

Quiet stretches and saves take turns, and each save is held against the quiet stretches right before and after it: what
else happens on the machine falls on both. All times are rank 0's; the ranks go in step.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from benchmarks.checkpointing.rivals import Rival
from benchmarks.checkpointing.training import Trainer

MARK = "SHOAL_BENCH_MARK"  # in the environment of every process of the benchmark, whoever has started it
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Stretch:
    """Some steps in a row."""

    steps: int
    seconds: float
    cpu_s: float  # of all processes of the benchmark

    def __add__(self, other: Stretch) -> Stretch:
        return Stretch(self.steps + other.steps, self.seconds + other.seconds, self.cpu_s + other.cpu_s)


@dataclass(frozen=True)
class Save:
    """A save and the steps around it."""

    stretch: Stretch
    stall_s: float  # the training thread of the slowest process stood still
    durable_s: float  # from the beginning to the last process's knowing that it is on disk


@dataclass(frozen=True)
class Cost:
    stall_s: float
    lost_s: float  # of training, in all
    cpu_s: float  # beyond what the same steps take without a save
    durable_s: float

    def __str__(self) -> str:
        return (
            f"{self.stall_s * 1e3:.1f} ms stall, {self.lost_s:.2f} s lost, {self.cpu_s:.2f} s CPU, "
            f"durable in {self.durable_s:.2f} s"
        )


def cost(save: Save, quiet: Stretch) -> Cost:
    steps = save.stretch.steps
    lost = save.stretch.seconds - steps * quiet.seconds / quiet.steps
    cpu = save.stretch.cpu_s - steps * quiet.cpu_s / quiet.steps
    return Cost(save.stall_s, lost, cpu, save.durable_s)


def quiet(trainer: Trainer, seconds: float) -> Stretch:
    """Steps with no save, for at least so long."""
    clock = _Clock(trainer)
    while not trainer.step(_nothing, clock.elapsed() >= seconds):
        clock.steps += 1
    clock.steps += 1
    return clock.stretch()


def save(trainer: Trainer, rival: Rival, step: int, seconds: float) -> Save:
    """A save, and steps until it is on disk and until at least so much time has passed."""
    clock = _Clock(trainer)
    stall_s = _timed(trainer, lambda: rival.begin(step))

    def wait() -> None:
        nonlocal stall_s
        stall_s += _timed(trainer, rival.before_update)

    over = False
    while not over:
        over = trainer.step(wait if clock.steps == 0 else _nothing, rival.done() and clock.elapsed() >= seconds)
        clock.steps += 1
    stretch = clock.stretch()
    return Save(stretch, *_slowest(stall_s, rival.durable_at - clock.began))


def alone(trainer: Trainer, rival: Rival, step: int) -> float:
    """Seconds of a save with nothing else to do."""
    trainer.settle()
    dist.barrier()
    began = time.perf_counter()
    rival.begin(step)
    rival.finish()
    return _slowest(rival.durable_at - began)[0]


def load(trainer: Trainer, rival: Rival, step: int, cold: bool) -> float:
    """Seconds until the last process has its state."""
    trainer.settle()
    if cold and dist.get_rank() == 0:
        drop_caches()
    dist.barrier()
    began = time.perf_counter()
    rival.load(step)
    trainer.settle()
    return _slowest(time.perf_counter() - began)[0]


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def can_drop_caches() -> bool:
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


class _Clock:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.settle()
        dist.barrier()
        self.steps, self._cpu_s, self.began = 0, _cpu_s(), time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def stretch(self) -> Stretch:
        self._trainer.settle()
        return Stretch(self.steps, self.elapsed(), _cpu_s() - self._cpu_s)


def _timed(trainer: Trainer, work) -> float:
    """How long the training stood still: what was queued on a device before is not the save's fault."""
    trainer.settle()
    began = time.perf_counter()
    work()
    trainer.settle()
    return time.perf_counter() - began


def _slowest(*mine: float) -> list[float]:
    everybody: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, list(mine))
    return [max(values) for values in zip(*everybody, strict=True)]


def _cpu_s() -> float:
    """CPU seconds so far of all processes that carry the mark: the ranks and whatever they have started. Rank 0's."""
    if dist.get_rank():
        return 0.0
    mark = f"{MARK}={os.environ[MARK]}".encode()
    total = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if mark in (process / "environ").read_bytes():
                    fields = (process / "stat").read_text().rpartition(")")[2].split()
                    total += int(fields[11]) + int(fields[12])  # user and system time
            except OSError:
                continue  # it has ended
    return total / TICKS


def _nothing() -> None:
    pass
