"""Thousands of ranks on other nodes, as node 0 hears of them: each once a second, with the messages of real agents."""

from __future__ import annotations

from pathlib import Path

from shoal.guard.nodes.process_states import Kernels
from shoal.guard.nodes.talk import Message, packed
from shoal.journal.beat import Marks
from shoal.journal.pulse_file import SAMPLE_AT, Device, PulseFolder, Sample, packed_head, packed_sample

TICK_S = 0.2
TURNS = 5  # a fifth of them is heard of at each look
PHASES = ("data", "exchange", "forward", "backward", "clip", "optimizer", "record")
STACK = tuple(f"torch/distributed/distributed_c10d.py:{i} all_reduce" for i in range(30))


class Crowd:
    """`kind`: their devices are `computing` in a long step, all are `waiting` for ever, or `marking` phases."""

    def __init__(self, world: int, kind: str) -> None:
        self.now, self._kind, self._world, self._turn = 100.0, kind, world, 0
        self.kernel = Kernels(range(0), PulseFolder(Path("nowhere")))
        self._marks = [Marks(0.0) for _ in range(world)]
        for step in range(6):
            self._step(range(world), step)
        self._take(range(world))

    @property
    def pids(self) -> dict[int, int]:
        return {rank: 1000 + rank for rank in range(self._world)}

    def advance(self) -> None:
        self.now, self._turn = self.now + TICK_S, self._turn + 1
        at = self._turn % TURNS
        ranks = range(at * self._world // TURNS, (at + 1) * self._world // TURNS)
        if self._kind == "marking":
            self._step(ranks, 6 + self._turn)
        self._take(ranks)

    def _step(self, ranks: range, step: int) -> None:
        for rank in ranks:
            for i, phase in enumerate(PHASES):
                self._marks[rank].mark(phase, step if i == 0 else None, self.now + i * 1e-3)
            self._marks[rank].worked(0.1 + 1e-4 * (rank % 7))

    def _take(self, ranks: range) -> None:
        about = {"state": "S", "io_bytes": 5, "worked_s": 1.0, "wanted_s": 1.0, "on_disk": False}
        said: Message = {"now": self.now, "ranks": {str(r): {**about, "pulse": self._pulse(r)} for r in ranks}}
        self.kernel.take(said, self.now)

    def _pulse(self, rank: int) -> str:
        marks, ticks = self._marks[rank], self._turn if self._kind == "computing" else 0
        groups = {"all/0/a": 100, f"shard/1/{rank // 8:08x}": 40, f"tp/2/{rank % 8:08x}": 50, "replicate/3/0": 3}
        sample = Sample(self.now, STACK, groups=groups, device=Device(ticks, queued=True))
        head = packed_head(marks.marks, 1000 + rank, marks)
        return packed(head.ljust(SAMPLE_AT, b"\0") + packed_sample(self._turn + 1, sample))
