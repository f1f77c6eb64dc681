"""What all islands of a run have alike: the state, and the rule by which a summed gradient changes it.

Everything here is decided from what all islands have traded, so that all decide alike without a word more.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any

import torch
import xxhash
from torch import Tensor

from shoal.errors import NumericsError
from shoal.islands.fleet import Fleet, Turn
from shoal.islands.pace import Pace
from shoal.islands.shard_feed import ShardFeed
from shoal.journal.journal import Record
from shoal.journal.pulse import SILENT, Pulse
from shoal.parallel.flat import Flat
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train.amount import flops_fields
from shoal.train.balance import Counts, nudge
from shoal.train.builtin_hooks import builtin_hooks
from shoal.train.clock import Clock, Timeline
from shoal.train.hooks import Hooks, Moment
from shoal.train.numerics import NotFinite, Numerics, Past, Rewind
from shoal.train.optim import Optimizers
from shoal.train.poison import Poison
from shoal.train.saves import Saves
from shoal.train.schedule import rates
from shoal.train.state import State, digest
from shoal.train.step import Step


class Finished(Exception):
    """All steps are done and saved; an island that was away while the others did them has nothing to do."""


Tell = Callable[..., None]
RECENT = 16  # records that the next first member can still write, if this one could not


@dataclass
class Island:
    """Everything the loop needs, made by `shoal.islands.worker`."""

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
    taken: int = 0  # steps
    hooks: Hooks = field(init=False)
    step: Step = field(init=False)
    rate: Callable[[int], float] = field(init=False)  # of a step, as a multiple of the peak
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
        around = self.poison, self.numerics, self.pulse, self.evaluate, lambda: self.saves
        self.hooks = builtin_hooks(self.run, self.model, *around, users=self.state.own.hooks)
        self.rate = rates(self.run, self.state.own.schedule)
        self.step = Step(self.run, self.model, self.optimizers, self.hooks)

    @property
    def batch(self) -> int:
        """Of the order of the data: the one that the next step reads."""
        return self.state.skips.batch_of(self.taken)

    @property
    def at(self) -> Moment:
        return Moment(self.taken, self.batch)

    def say(self, kind: str, **fields: Any) -> None:
        """What all islands know and the first one writes: if it could not, the next one does."""
        self.recent.append((kind, fields))
        self.tell(kind, **fields)

    def log(self) -> None:
        """What hooks have to say of the last step."""
        if values := self.hooks.logged():
            self.say("metrics", step=self.taken, values=values)

    # What all islands have alike: shoal.islands.fleet.Replica.

    def restore(self, back: dict[str, Any] | None) -> tuple[int, str]:
        self.flat.forget()
        self.recent.clear()
        self.taken = self.reload(None if back is None else back["good"])
        past = self.past(self.taken) if back is None else self._gone_back(back)
        self.state.skips.resume(self.state.skips.spans, self.taken, past.spans)
        self.numerics.stand(past)
        if self.taken >= self.run.steps:
            raise Finished
        notes = xxhash.xxh3_64_hexdigest(json.dumps(self.notes()).encode())
        return self.taken, f"{digest(self.model, self.place)} {notes}"

    def _gone_back(self, back: dict[str, Any]) -> Past:
        """The state stands before a spike again; the batches from there on are gone around."""
        past = Past(**back["past"])
        self.numerics.stand(past)
        cause = Rewind(back["good"], back["step"], back["why"], back["begin"])
        past.spans.append(self.numerics.rewound(cause, self.taken, past.spans))
        past.rewound.append(cause.step)
        past.taken = [one for one in past.taken if one[0] <= self.taken]
        return past

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def notes(self) -> dict[str, Any]:
        past = asdict(self.numerics.standing())
        past["taken"] = [one for one in past["taken"] if all(map(math.isfinite, one))]  # JSON has no NaN
        return {"step": self.taken, "past": past, "hooks": self.state.own.states()}

    def stands_at(self, step: int, notes: dict[str, Any]) -> None:
        past = Past(**notes["past"])
        self.taken = int(notes["step"])
        self.state.skips.spans = past.spans
        self.numerics.stand(past)
        self.state.own.load(notes.get("hooks"))
        self.optimizers.set_step(self.taken)
        self.model.spread()

    def apply(self, step: int, total: Tensor, said: list[dict[str, Any]]) -> None:
        fields = self.update(total, said, Clock())
        if fields is not None:
            self.numerics.taken(self.taken, fields["loss"], fields["grad_norm"])

    def update(self, total: Tensor, said: list[dict[str, Any]], clock: Clock) -> Record | None:
        """The one update of a step, from what all islands have traded: the same on each of them, bit for bit. None
        where its numbers are wrong, and the batch is left out."""
        targets = sum(s["targets"] for s in said)
        if not targets:
            raise NumericsError(
                f"step {self.taken + 1} has no target token: the data's loss mask hides every token of its batch."
            )
        losses = math.fsum(math.nan if loss is None else loss for s in said for loss in s["losses"])
        loss = torch.tensor(losses, dtype=torch.float64, device=self.place.device)
        self.flat.install(total)
        try:
            taken = self.step.update(self.at, loss, targets, self.rate(self.taken), clock, self._settle)
        except NotFinite as wrong:
            self.numerics.skip(self.taken, wrong)
            return None
        self.taken += 1
        tokens = sum(s["tokens"] for s in said)
        fields = {"tokens": tokens, "targets": targets, **taken._asdict()}
        fields |= flops_fields(self.run, self.model.shape, tokens, sum(s["pairs"] for s in said))
        return fields | self._balance([Counts.of(s["experts"]) for s in said if "experts" in s])

    def _settle(self) -> None:
        if self.saves:
            self.saves.settle()

    def _balance(self, counts: list[Counts]) -> Record:
        """The experts of this step, over all islands."""
        if not counts:
            return {}
        return nudge(self.model, self.taken, reduce(Counts.__add__, counts), self.say)
