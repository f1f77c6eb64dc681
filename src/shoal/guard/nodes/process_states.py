"""What the nodes of a group tell of its processes: their pulses, and what the kernels say of them.

Those of other nodes come with their agents' messages and stay in memory; nothing is decoded before somebody asks.
"""

from __future__ import annotations

from shoal.guard.nodes.talk import Message, unpacked
from shoal.guard.signs import Kernel, Signs, Threads
from shoal.journal.beat import Beat
from shoal.journal.pulse_file import Heard, PulseFolder, Sample

_NO_SIGNS, _NO_THREADS = Signs(), Threads()


class Kernels(Kernel):
    def __init__(self, ranks_here: range, pulses_here: PulseFolder) -> None:
        super().__init__()
        self._ranks, self._folder = ranks_here, pulses_here
        self._signs: dict[int, Signs] = {}
        self._threads: dict[int, Threads] = {}
        self._heard: dict[int, float] = {}
        self._pulses: dict[int, Heard] = {}
        self._news = set[int]()

    def take(self, said: Message, now: float) -> None:
        """What an agent tells of its ranks. Times in it are of that machine's clock."""
        later_s = now - float(said["now"])
        for text, one in said["ranks"].items():
            self.hear(int(text), one, now)
            if data := unpacked(one["pulse"]):
                self._pulses.setdefault(int(text), Heard()).hear(data, later_s)

    def hear(self, rank: int, said: Message, now: float) -> None:
        """Of its threads an agent tells while the rank marks nothing."""
        self._heard[rank] = now
        self._news.add(rank)
        self._signs[rank] = Signs(str(said["state"]), int(said["io_bytes"]))
        if "worked_s" in said:
            self._threads[rank] = Threads(float(said["worked_s"]), float(said["wanted_s"]), bool(said["on_disk"]))

    def beat(self, rank: int) -> Beat | None:
        if rank in self._ranks:
            return self._folder.beat(rank)
        heard = self._pulses.get(rank)
        return None if heard is None else heard.beat

    def sample(self, rank: int) -> Sample | None:
        if rank in self._ranks:
            return self._folder.sample(rank)
        heard = self._pulses.get(rank)
        return None if heard is None else heard.sample

    def signs(self, rank: int, pid: int) -> Signs:
        return super().signs(rank, pid) if rank in self._ranks else self._signs.get(rank, _NO_SIGNS)

    def threads(self, rank: int, pid: int) -> Threads:
        return super().threads(rank, pid) if rank in self._ranks else self._threads.get(rank, _NO_THREADS)

    def fresh(self) -> list[int]:
        fresh, self._news = [*self._ranks, *self._news], set()
        return fresh

    def unheard(self, now: float, seconds: float) -> list[int]:
        return [rank for rank, at in self._heard.items() if now - at > seconds]

    def here(self, rank: int) -> bool:
        return rank in self._ranks
