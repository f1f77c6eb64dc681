"""Seeded faults on islands that really train: killed, stopped, told to leave; one or two, the first one too."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field

from shoal.islands.member import SILENT_S
from tests.islands.archipelago import Archipelago
from tests.patience import Stopwatch

KINDS = ("kill", "kill", "kill", "stop", "pause", "first", "two", "preempt")
MOST_S = 300.0
LAST = 60  # steps without a fault at the end: whoever is away comes back before it


@dataclass
class Storm:
    fleet: Archipelago
    seed: int
    faults: int
    killed: list[float] = field(default_factory=list)  # Unix times
    _back: dict[int, tuple[float, str]] = field(default_factory=dict)  # island → when, and how it comes back

    def blow(self) -> str:
        """From the start of the islands to their end: what was wrong; nothing, if nothing was."""
        self._rng, steps = random.Random(self.seed), self.fleet.run.train.steps
        self.fleet.start(*range(self.fleet.run.fleet.islands))
        self.fleet.wait_for_step(3)
        moments, watch = sorted(self._rng.sample(range(4, steps - LAST), self.faults)), Stopwatch()
        while self.fleet.pids or self._back:
            if wrong := self._come_back():
                return wrong
            step = max((r["step"] for r in self.fleet.journal("step")), default=0)
            members = self.fleet.journal("epoch")[-1]["members"]
            free = [island for island in self.fleet.pids if island not in self._back]
            # Somebody who has the state is left alone: when all die, a run goes on from its checkpoint.
            if moments and step >= moments[0] and sum(island in members for island in free) > 2:
                moments.pop(0)
                self._fault(free, members)
            if watch.quiet_s() > MOST_S:
                return f"stands still at step {step}: {self.fleet.logs()[-3000:]}"
            time.sleep(0.01)
        told = [r["step"] for r in self.fleet.journal("step")]
        if moments:
            return f"{len(moments)} faults were not reached"
        return "" if told == list(range(1, steps + 1)) else f"the journal's steps are {told}"

    def _come_back(self) -> str:
        now = time.monotonic()
        for island in [i for i, (at, _) in self._back.items() if at <= now]:
            if self._back.pop(island)[1] == "start":
                self.fleet.start(island)
            else:
                self.fleet.signal(island, signal.SIGCONT)
        for island, codes in self.fleet.reap().items():
            if codes == {143}:
                self._back[island] = (now + 0.2, "start")  # it was told to leave, and comes back
            elif codes != {0}:
                return f"island {island} ended with {codes}: {self.fleet.logs()[-1500:]}"
        return ""

    def _fault(self, free: list[int], members: list[int]) -> None:
        rng, now = self._rng, time.monotonic()
        kind, island = rng.choice(KINDS), rng.choice(free)
        if kind == "first":
            island = next((i for i in members if i in free), island)
        if kind in ("stop", "pause"):
            self.fleet.signal(island, signal.SIGSTOP)
            self._back[island] = (now + (SILENT_S + 1.0 if kind == "stop" else rng.uniform(0.1, 1.5)), "go on")
        elif kind == "preempt":
            self.fleet.signal(island, signal.SIGTERM)
        else:
            for victim in rng.sample(free, 2) if kind == "two" and len(free) > 2 else [island]:
                self.killed.append(time.time())
                self.fleet.kill(victim)
                self._back[victim] = (now + rng.choice([0.0, 0.3, 1.0]), "start")
