"""One peer's round of inner steps: how large they are, how fast they learn, what they have used."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.spec.run import Run
from shoal.swarm.trainer.keeper import Work
from shoal.swarm.trainer.mesh import InnerStep
from shoal.swarm.trainer.samples import Samples
from shoal.train.schedule import lr_ratio

LEAST_STEPS = 8  # of a round: a peer too slow for so many takes smaller ones instead of fewer
FIRST_RATIO = 0.05  # of the learning rate, with which a newcomer's first round begins
SPEED_MEMORY = 0.7


@dataclass
class Round:
    number: int
    samples: Samples
    samples_done: int  # of the whole swarm, before it
    seconds: float  # that it is meant to last
    began: float | None = None  # monotonic
    ended: bool = False  # by the node
    work: Work = field(default_factory=Work)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Round:
        samples = Samples(said["ranges"])
        return cls(int(said["round"]), samples, int(said.get("samples_done", 0)), float(said.get("seconds", 0.0)))

    @property
    def used(self) -> int:
        return sum(b - a for a, b in self.samples.used)

    def took(self, step: InnerStep, seconds: float) -> None:
        work = self.work
        work.used = [list(r) for r in self.samples.used]
        work.seconds = round(work.seconds + seconds, 6)
        if step.taken:
            work.steps += 1
            work.tokens += step.tokens
            work.loss_sum += step.loss * step.targets
            work.targets += step.targets


class Pace:
    """How much a peer does at a time, and how fast the whole swarm goes, as far as it can be told from here."""

    def __init__(self, run: Run, readers: int) -> None:
        self._run, self._readers = run, readers
        swarm = run.swarm
        asked = run.train.batch // swarm.peers if swarm.batch == "auto" else int(swarm.batch)
        self._most = max(readers, asked // readers * readers)
        self._fixed = swarm.batch != "auto"
        self._per_s: float | None = None  # own samples
        self._growth = float(swarm.peers)  # samples of the whole swarm for one of this peer's
        self._last: tuple[int, int] | None = None  # (samples_done, own samples) of the round before
        self._first: int | None = None  # round of this process's life, where it came to a run under way
        self._known = False

    def batch(self, round: Round) -> int:
        """Windows in a step. Halved until enough steps fit into the round."""
        batch = self._most
        if self._fixed or self._per_s is None or not round.seconds:
            return batch
        while batch // 2 >= self._readers and self._per_s * round.seconds < LEAST_STEPS * batch:
            batch = batch // 2 // self._readers * self._readers
        return batch

    def begins(self, round: Round) -> None:
        if not self._known:
            self._known, self._first = True, round.number if round.samples_done else None
        if self._last is not None and self._last[1] and round.samples_done > self._last[0]:
            self._growth = (round.samples_done - self._last[0]) / self._last[1]
        round.began = time.monotonic()

    def ends(self, round: Round) -> None:
        self._last = (round.samples_done, round.used)

    def took(self, samples: int, seconds: float) -> None:
        now = samples / max(seconds, 1e-6)
        self._per_s = now if self._per_s is None else SPEED_MEMORY * self._per_s + (1 - SPEED_MEMORY) * now

    def progress(self, round: Round) -> int:
        """Steps of the whole run that are done by now, as its schedule counts them."""
        done = round.samples_done + self._growth * round.used
        return min(int(done // self._run.train.batch), self._run.steps - 1)

    def ratio(self, round: Round) -> float:
        """Of the peak learning rate. A newcomer's moments are empty, and its first steps would be too long."""
        ratio = lr_ratio(self._run.train.schedule, self.progress(round), self._run.steps)
        if round.number == self._first and round.began is not None and round.seconds:
            ratio *= min(1.0, FIRST_RATIO + (time.monotonic() - round.began) / round.seconds)
        return ratio
