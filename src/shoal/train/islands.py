"""The training loop of an island: the same step as `shoal.train.loop`, with its gradient summed over all islands.

A step is computed shard by shard. Whoever comes or goes meanwhile, each shard is computed once for the sum, by some
island; the step is applied by all of them or by none (`shoal.fleet`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.checkpoint import faults
from shoal.data.shard_feed import ShardFeed
from shoal.errors import NumericsError, Stopped
from shoal.fleet.flat import Flat
from shoal.fleet.fleet import Fleet, Turn
from shoal.fleet.member import Evicted
from shoal.fleet.trade import Offer, Traded
from shoal.fleet.tree import Forest
from shoal.observe.pulse import SILENT, Pulse
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.track.journal import Record
from shoal.train.clock import Clock
from shoal.train.optim import Optimizers
from shoal.train.saves import Saves
from shoal.train.schedule import lr_ratio
from shoal.train.seed import seed_step
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
    reload: Callable[[], int]  # the state as it is in the newest checkpoint, or at the beginning; its step
    new_saves: Callable[[int], Saves]  # of the island that has become the first, at a step
    took_part: Callable[[int, Turn], None]  # at the beginning of an epoch
    pulse: Pulse = SILENT
    flat: Flat = field(init=False)
    total: Tensor = field(init=False)
    saves: Saves | None = None
    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        self.flat = Flat(p for _, p in self.model.named_parameters())
        self.total = self.flat.empty()

    # What all islands have alike: shoal.fleet.fleet.Replica.

    def restore(self) -> tuple[int, str]:
        self.flat.forget()
        self.recent.clear()
        step = self.reload()
        if step >= self.run.train.steps:
            raise Finished
        return step, digest(self.model, self.place)

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def stands_at(self, step: int) -> None:
        self.optimizers.set_step(step)
        self.model.spread()

    def apply(self, step: int, total: Tensor, said: list[dict[str, Any]]) -> None:
        self.update(step, total, said)

    def update(self, step: int, total: Tensor, said: list[dict[str, Any]]) -> Record:
        """The one update of a step, from what all islands have traded: the same on each of them, bit for bit."""
        targets = sum(s["targets"] for s in said)
        if not targets:
            raise NumericsError(
                f"step {step + 1} has no target token: the data's loss mask hides every token of its batch."
            )
        loss = math.fsum(loss for s in said for loss in s["losses"]) / targets
        self.flat.install(total)
        norm = float(self.model.clip(1 / targets, self.run.train.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumericsError(
                f"step {step + 1} has loss {loss} and gradient norm {norm}, so no update was made: lower "
                "train.optimizer.lr, lengthen train.schedule.warmup_steps or set train.clip, then resume the run."
            )
        if self.saves:
            self.saves.settle()
        lr = self.optimizers.step(lr_ratio(self.run.train.schedule, step, self.run.train.steps))
        self.model.spread()
        tokens = sum(s["tokens"] for s in said)
        return {"tokens": tokens, "targets": targets, "loss": loss, "grad_norm": norm, "lr": lr}


def train(t: Island) -> None:
    """From entering the fleet to the last step. An island that was left behind comes back."""
    while True:
        t.pulse.mark("join")
        try:
            return _train(t, t.fleet.enter(t))
        except Finished:
            return None
        except Evicted:
            _not_first(t)


def _train(t: Island, first_step: int) -> None:
    total = t.run.train.steps
    for step in range(first_step, total):
        _leave_if_told(t, step)
        record = train_step(t, step)
        t.recent.append(record)
        t.tell("step", **record)
        done = step + 1
        every = t.run.eval.every
        if every and done % every == 0 and done < total:
            t.pulse.mark("evaluate")
            t.evaluate(done)
        t.pulse.mark("save")
        if t.saves and done < total:
            t.saves.after(done)
    t.pulse.mark("evaluate")
    t.evaluate(total)
    t.pulse.mark("finish")
    # Nobody leaves before the last state is saved: if the first island dies over it, the next one does it.
    while (turn := t.fleet.take(total, t)) is not None:
        _begin_epoch(t, turn, total)
        if t.saves:
            t.saves.now(total, must=True)
        if t.fleet.together(total):
            return


def train_step(t: Island, step: int) -> Record:
    clock = Clock(t.pulse, step)
    faults.reach("step")
    work = Work(t, step)
    while True:
        t.pulse.mark("trade")
        turn = t.fleet.take(step, t)
        if turn is None:
            raise AssertionError(f"step {step + 1} was decided without this island's sum")
        _begin_epoch(t, turn, step)
        work.compute(turn.shards, clock)
        t.pulse.mark("trade")
        traded = t.fleet.trade(step, work.offer(), t.total, t.run.fleet.deterministic)
        clock.lap("exchange_s")
        if traded is not None:
            break
    t.pulse.mark("optimizer")
    _votes(t, step)
    fields = t.update(step, traded.total, traded.said)
    t.fleet.applied(step, traded)
    t.feed.prepare(step + 1, turn.shards)
    clock.lap("optimizer_s", then="record")
    return {
        "step": step + 1,
        "begin": clock.begin,
        "position": t.state.skips.batch_of(step) * t.run.train.batch,
        "samples": _samples(t, traded),
        **fields,
        "time": clock.laps,
        "epoch": turn.epoch.number,
        "islands": [card.island for card in turn.epoch.members],
    }


class Work:
    """What this island has computed of one step. It is kept until the step is decided."""

    def __init__(self, t: Island, step: int) -> None:
        self._t, self._step = t, step
        self._done: list[int] = []
        self._losses: list[float] = []
        self._targets = self._tokens = 0
        self._sum: Tensor | None = None
        self._forest = Forest[Tensor](t.fleet.shards, lambda a, b: a.add_(b))
        t.flat.forget()

    def compute(self, shards: list[int], clock: Clock) -> None:
        """Those that are not computed yet."""
        todo = [shard for shard in shards if shard not in self._done]
        one_by_one = self._t.run.fleet.deterministic or self._t.model.pipeline is not None
        for some in [[shard] for shard in todo] if one_by_one else [todo] * bool(todo):
            self._t.pulse.mark("data")
            batches = [batch for shard in some for batch in self._t.feed.get(self._step, shard)]
            clock.lap("data_s")
            seed_step(self._t.run.seed, self._step, some[0] * self._t.place.sizes.dp + self._t.place.at["dp"])
            loss = float(self._t.model.total(self._t.model.backward(batches, self._t.pulse.mark)))
            self._t.pulse.mark("clip")
            mine = [sum(batch.target_count for batch in batches), sum(batch.tokens.size for batch in batches)]
            targets, tokens = self._t.place.sum_of_batch(*mine)
            self._losses.append(loss)
            self._targets, self._tokens = self._targets + int(targets), self._tokens + int(tokens)
            self._done += some
            self._add(some, self._t.flat.gather(self._t.flat.empty()))
            clock.lap("compute_s")

    def _add(self, some: list[int], gradient: Tensor) -> None:
        """Gradients are not left to add up in the parameters: each backward pass is whole by itself."""
        self._t.flat.forget()
        if self._t.run.fleet.deterministic:
            self._forest.plant((some[0], some[0] + 1), gradient)
        else:
            self._sum = gradient if self._sum is None else self._sum.add_(gradient)

    def offer(self) -> Offer:
        says = {"shards": self._done, "targets": self._targets, "tokens": self._tokens, "losses": self._losses}
        if self._t.run.fleet.deterministic:
            return Offer(list(self._forest.sums), list(self._forest.sums.values()), says)
        mine = [] if self._sum is None else [self._sum]
        return Offer([(0, 0)] * len(mine), mine, says)


def _samples(t: Island, traded: Traded) -> int:
    """All of the batch, each once: a step that used others is worse than none."""
    shards = sorted(shard for said in traded.said for shard in said["shards"])
    assert shards == list(range(t.fleet.shards)), f"the shards of the step were {shards}"
    return t.run.train.batch


def _votes(t: Island, step: int) -> None:
    """How the saves stand, among the ranks of the island that makes them."""
    if t.saves:
        t.saves.heard(*t.place.sum_of_batch(*t.saves.votes(step)))


def _begin_epoch(t: Island, turn: Turn, step: int) -> None:
    if t.fleet.is_first and t.saves is None:
        t.saves = t.new_saves(step)
    elif not t.fleet.is_first and t.saves is not None:
        _not_first(t)
    t.took_part(step, turn)


def _not_first(t: Island) -> None:
    if t.saves is not None:
        t.saves.close()
        t.saves = None


def _leave_if_told(t: Island, step: int) -> None:
    """Told to stop, an island leaves; the last one saves first."""
    (told,) = t.place.sum(float(t.told_to_stop()))
    if not told:
        return
    if t.fleet.leave():
        raise Stopped(f"island {t.fleet.island} has left after step {step}; the others go on.")
    turn = t.fleet.take(step, t)
    assert turn is not None
    _begin_epoch(t, turn, step)
    assert t.saves is not None
    t.saves.now(step, must=False)
    total, name = t.run.train.steps, t.run.name
    raise Stopped(f"stopped after step {step} of {total}; the state is saved, `shoal resume {name}` goes on.")
