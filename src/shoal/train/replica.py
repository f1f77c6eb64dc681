"""What all islands of a run have alike: the state, and the rule by which a summed gradient changes it.

Everything here is decided from what all islands have traded, so that all decide alike without a word more.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any

import xxhash
from torch import Tensor

from shoal.data.shard_feed import ShardFeed
from shoal.errors import NumericsError
from shoal.fleet.flat import Flat
from shoal.fleet.fleet import Fleet, Turn
from shoal.observe.pulse import SILENT, Pulse
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.track.journal import Record
from shoal.train.amount import flops_fields
from shoal.train.balance import Counts, nudge
from shoal.train.clock import Timeline
from shoal.train.numerics import NotFinite, Numerics, Past, Rewind
from shoal.train.optim import Optimizers
from shoal.train.pace import Pace
from shoal.train.poison import Poison
from shoal.train.saves import Saves
from shoal.train.schedule import lr_ratio
from shoal.train.state import State, digest


class Finished(Exception):
    """All steps are done and saved; an island that was away while the others did them has nothing to do."""


Tell = Callable[..., None]
RECENT = 16  # records that the next first member can still write, if this one could not


@dataclass
class Island:
    """Everything the loop needs, made by `shoal.train.island_worker`."""

    run: Run
    place: Place
    model: Laid
    optimizers: Optimizers
    state: State
    feed: ShardFeed
    fleet: Fleet
    tell: Tell  # writes a journal record; does nothing unless this island is the first
    told_to_stop: Callable[[], bool]
    evaluate: Callable[[int], object]
    reload: Callable[[int | None], int]  # the state as in the newest checkpoint (up to a step) or as new; its step
    past: Callable[[int], Past]  # what the journal knows of a run that goes on from a step
    new_saves: Callable[[int], Saves]  # of the island that has become the first, at a step
    took_part: Callable[[int, Turn], None]  # at the beginning of an epoch
    good_before: Callable[[int], int]  # the newest saved step up to one; -1: none
    pulse: Pulse = SILENT
    poison: Poison = field(default_factory=lambda: Poison("", 0))
    timeline: Timeline | None = None  # of this process's GPU
    step: int = 0  # how many are taken
    flat: Flat = field(init=False)
    total: Tensor = field(init=False)
    numerics: Numerics = field(init=False)
    saves: Saves | None = None
    pace: Pace = field(default_factory=Pace)
    too_slow: bool = False  # so that this island is to leave
    rests: int = 0  # for which it has left so often
    recent: deque[tuple[str, Record]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        self.flat = Flat(p for _, p in self.model.named_parameters())
        self.total = self.flat.empty()
        self.numerics = Numerics(self.run.guard, self.state.skips, self.say, good_before=self.good_before)

    @property
    def batch(self) -> int:
        """Of the order of the data: the one that the next step reads."""
        return self.state.skips.batch_of(self.step)

    def say(self, kind: str, **fields: Any) -> None:
        """What all islands know and the first one writes: if it could not, the next one does."""
        self.recent.append((kind, fields))
        self.tell(kind, **fields)

    # What all islands have alike: shoal.fleet.fleet.Replica.

    def restore(self, back: dict[str, Any] | None) -> tuple[int, str]:
        self.flat.forget()
        self.recent.clear()
        self.step = self.reload(None if back is None else back["good"])
        past = self.past(self.step) if back is None else self._gone_back(back)
        self.state.skips.resume(self.state.skips.spans, self.step, past.spans)
        self.numerics.stand(past)
        if self.step >= self.run.steps:
            raise Finished
        notes = xxhash.xxh3_64_hexdigest(json.dumps(self.notes()).encode())
        return self.step, f"{digest(self.model, self.place)} {notes}"

    def _gone_back(self, back: dict[str, Any]) -> Past:
        """The state stands before a spike again; the batches from there on are gone around."""
        past = Past(**back["past"])
        self.numerics.stand(past)
        cause = Rewind(back["good"], back["step"], back["why"], back["begin"])
        past.spans.append(self.numerics.rewound(cause, self.step, past.spans))
        past.rewound.append(cause.step)
        past.taken = [one for one in past.taken if one[0] <= self.step]
        return past

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def notes(self) -> dict[str, Any]:
        past = asdict(self.numerics.standing())
        past["taken"] = [one for one in past["taken"] if all(map(math.isfinite, one))]  # JSON has no NaN
        return {"step": self.step, "past": past}

    def stands_at(self, step: int, notes: dict[str, Any]) -> None:
        past = Past(**notes["past"])
        self.step = int(notes["step"])
        self.state.skips.spans = past.spans
        self.numerics.stand(past)
        self.optimizers.set_step(self.step)
        self.model.spread()

    def apply(self, step: int, total: Tensor, said: list[dict[str, Any]]) -> None:
        fields = self.update(total, said, time.time())
        if fields is not None:
            self.numerics.taken(self.step, fields["loss"], fields["grad_norm"])

    def update(self, total: Tensor, said: list[dict[str, Any]], begin: float) -> Record | None:
        """The one update of a step, from what all islands have traded: the same on each of them, bit for bit. None
        where its numbers are wrong, and the batch is left out."""
        targets = sum(s["targets"] for s in said)
        if not targets:
            raise NumericsError(
                f"step {self.step + 1} has no target token: the data's loss mask hides every token of its batch."
            )
        loss = math.fsum(math.nan if loss is None else loss for s in said for loss in s["losses"]) / targets
        self.flat.install(total)
        grad_norm, factor = self.model.norm(1 / targets, self.run.train.clip)
        norm = float(grad_norm)
        try:
            self.numerics.check(self.batch, (loss, norm), begin)
        except NotFinite as wrong:
            self.numerics.skip(self.step, wrong)
            self.optimizers.forget()
            return None
        if self.saves:
            self.saves.settle()
        lr = self.optimizers.step(lr_ratio(self.run.train.schedule, self.step, self.run.steps), factor)
        self.model.spread()
        self.step += 1
        tokens = sum(s["tokens"] for s in said)
        fields = {"tokens": tokens, "targets": targets, "loss": loss, "grad_norm": norm, "lr": lr}
        fields |= flops_fields(self.run, self.model.shape, tokens, sum(s["pairs"] for s in said))
        return fields | self._balance([Counts.of(s["experts"]) for s in said if "experts" in s])

    def _balance(self, counts: list[Counts]) -> Record:
        """The experts of this step, over all islands."""
        if not counts:
            return {}
        return nudge(self.model, self.step, reduce(Counts.__add__, counts), self.say)
