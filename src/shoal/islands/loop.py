"""The training loop of an island: the same step as `shoal.train.loop`, with its gradient summed over all islands.

A step is computed shard by shard. Whoever comes or goes meanwhile, each shard is computed once for the sum, by some
island; the step is applied by all of them or by none (`shoal.islands`).

The fleet counts rounds: batches whose gradient was summed. A round is a step unless its numbers are wrong; then the
batch is left out, by all islands alike, since all decide from the same sum (`shoal.train.numerics`).
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict

from torch import Tensor

from shoal.errors import Stopped
from shoal.islands.fleet import Turn
from shoal.islands.member import Evicted
from shoal.islands.pace import Pace, rest_s
from shoal.islands.replica import Finished, Island
from shoal.islands.trade import Offer, Traded
from shoal.journal.journal import Record
from shoal.spec.island_sums import Forest
from shoal.train.amount import amount
from shoal.train.balance import Counts, counted, forget
from shoal.train.clock import Clock
from shoal.train.hooks import Moment
from shoal.train.numerics import Rewind


class TooSlow(Exception):
    """This island has left the others, which it kept waiting."""


def train(t: Island) -> None:
    """From entering the fleet to the last step. An island that was left behind comes back."""
    while True:
        t.pulse.mark("join")
        try:
            return _train(t, t.fleet.enter(t, t.told_to_stop))
        except Finished:
            return None
        except Evicted:
            _not_first(t)
        except TooSlow:
            _not_first(t)
            _rest(t)
        except Rewind as spike:
            past = asdict(t.numerics.standing())
            t.fleet.go_back(
                {"good": spike.good, "step": spike.step, "why": spike.why, "begin": spike.begin, "past": past}
            )
            if t.saves:
                t.saves.set_aside()
            t.saves = None
        finally:
            t.hooks.close()


def _train(t: Island, first_round: int) -> None:
    total, number = t.run.steps, first_round
    t.pace = Pace()
    t.hooks.start(t.model, t.taken)
    while t.taken < total:
        if t.numerics.alarm():
            t.numerics.go_back(t.taken)
        _leave_if_told(t, number)
        record = train_step(t, number)
        number += 1
        if record is None:
            continue
        t.say("step", **record)
        t.hooks.step(Moment(t.taken, t.state.skips.batch_of(t.taken - 1)), record)
        t.log()
        t.hooks.save(t.taken)
    t.hooks.end(total)
    t.log()
    t.pulse.mark("finish")
    # Nobody leaves before the last state is saved: if the first island dies over it, the next one does it.
    while (turn := t.fleet.take(number, t)) is not None:
        _begin_epoch(t, turn)
        if t.saves:
            t.saves.now(total, must=True)
        if t.fleet.together(number):
            return


def train_step(t: Island, number: int) -> Record | None:
    """A round of the fleet. None: the numbers of its batch are wrong, and no step was taken."""
    clock, batch = Clock(t.pulse, t.taken, t.timeline), t.batch
    work = Work(t, batch)
    while True:
        clock.mark("trade")
        turn = t.fleet.take(number, t)
        if turn is None:
            raise AssertionError(f"step {t.taken + 1} was decided without this island's sum")
        _begin_epoch(t, turn)
        work.compute(turn.shards, clock)
        clock.mark("trade")
        traded = t.fleet.trade(number, work.offer(clock), t.total, t.run.fleet.deterministic)
        clock.lap("exchange_s")
        if traded is not None:
            break
    clock.mark("optimizer")
    _pace(t, traded)
    _votes(t)
    fields = t.update(traded.total, traded.said, clock)
    t.fleet.applied(number, traded)
    t.feed.prepare(t.batch, turn.shards)
    clock.lap("optimizer_s", then="record")
    if fields is None:
        return None
    return {
        "step": t.taken,
        "begin": clock.begin,
        "position": batch * t.run.train.batch,
        "samples": _samples(t, traded),
        **fields,
        **clock.fields(),
        "epoch": turn.epoch.number,
        "islands": [card.island for card in turn.epoch.members],
    }


class Work:
    """What this island has computed of one batch. It is kept until it is decided whether the step is taken."""

    def __init__(self, t: Island, batch: int) -> None:
        self._t, self._batch = t, batch
        self._done: list[int] = []
        self._losses: list[float] = []
        self._targets = self._tokens = self._pairs = 0
        self._sum: Tensor | None = None
        self._counts: Counts | None = None  # of experts
        self._weight: float | None = None  # of a token, in the routers' own losses
        self._forest = Forest[Tensor](t.fleet.shards, lambda a, b: a.add_(b))
        t.flat.forget()

    def compute(self, shards: list[int], clock: Clock) -> None:
        """Those that are not computed yet."""
        todo = [shard for shard in shards if shard not in self._done]
        one_by_one = self._t.run.fleet.deterministic or self._t.model.pipeline is not None
        for some in [[shard] for shard in todo] if one_by_one else [todo] * bool(todo):
            clock.mark("data")
            batches = [batch for shard in some for batch in self._t.feed.get(self._batch, shard)]
            at = self._t.at
            batches = self._t.step.samples(at, batches)
            clock.lap("data_s")
            summing = self._t.place.begin_sum_of_batch(*amount(self._t.model, batches))
            weight, reader = self._token_weight(), some[0] * self._t.place.sizes.dp + self._t.place.at["dp"]
            loss = float(self._t.step.gradient(at, (at.step, reader), batches, clock, weight))
            targets, tokens, pairs = map(int, summing.wait())
            self._losses.append(loss)
            self._targets, self._tokens = self._targets + targets, self._tokens + tokens
            self._pairs += pairs
            self._done += some
            self._add(some, self._t.flat.gather(self._t.flat.empty()))
            self._count()
            clock.lap("compute_s")

    def _token_weight(self) -> float:
        """That of the whole batch, whose other shards other islands compute. Collective, among an island's ranks."""
        if self._t.model.shape.experts is None:
            return 1.0
        if self._weight is None:
            targets, tokens = self._t.place.sum_of_batch(*self._t.feed.count(self._batch))
            self._weight = targets / max(1.0, tokens)
        return self._weight

    def _add(self, some: list[int], gradient: Tensor) -> None:
        """Gradients are not left to add up in the parameters: each backward pass is whole by itself."""
        self._t.flat.forget()
        if self._t.run.fleet.deterministic:
            self._forest.plant((some[0], some[0] + 1), gradient)
        else:
            self._sum = gradient if self._sum is None else self._sum.add_(gradient)

    def _count(self) -> None:
        """What the experts had to do, likewise."""
        counts = counted(self._t.model, self._t.taken + 1)
        if counts is not None:
            self._counts = counts if self._counts is None else self._counts + counts
            forget(self._t.model)

    def offer(self, clock: Clock) -> Offer:
        losses = [loss if math.isfinite(loss) else None for loss in self._losses]  # JSON has no NaN
        says = {"shards": self._done, "targets": self._targets, "tokens": self._tokens, "losses": losses}
        seconds = {"data": clock.laps.get("data_s", 0.0), "forward": clock.laps.get("compute_s", 0.0)}
        says |= {"pairs": self._pairs, "island": self._t.fleet.island, "seconds": seconds}
        if self._counts is not None:
            says["experts"] = self._counts.said()
        if self._t.run.fleet.deterministic:
            return Offer(list(self._forest.sums), list(self._forest.sums.values()), says)
        mine = [] if self._sum is None else [self._sum]
        return Offer([(0, 0)] * len(mine), mine, says)


def _samples(t: Island, traded: Traded) -> int:
    """All of the batch, each once: a step that used others is worse than none."""
    shards = sorted(shard for said in traded.said for shard in said["shards"])
    assert shards == list(range(t.fleet.shards)), f"the shards of the step were {shards}"
    return t.run.train.batch


def _pace(t: Island, traded: Traded) -> None:
    """Says which islands are slow; whether this one is to leave for it is decided before the next step."""
    evict = t.run.guard.on_straggler == "evict"
    for slow in t.pace.heard(traded.said):
        t.tell("straggler", island=slow.rank, action="evict" if evict else "wait", **slow.fields())
        t.too_slow = t.too_slow or (evict and slow.rank == t.fleet.island)


def _rest(t: Island) -> None:
    """Stays away for a while. The others have the state, and give it back."""
    t.rests += 1
    until = time.monotonic() + rest_s(t.rests)
    while t.place.sum(float(time.monotonic() < until))[0]:
        t.pulse.mark("join")
        if t.place.sum(float(t.told_to_stop()))[0]:
            raise Stopped(f"island {t.fleet.island} was told to stop while it stayed away for being slow.")
        time.sleep(min(0.5, max(0.0, until - time.monotonic())))


def _votes(t: Island) -> None:
    """How the saves stand, among the ranks of the island that makes them."""
    if t.saves:
        t.saves.heard(*t.place.sum_of_batch(*t.saves.votes(t.taken)))


def _begin_epoch(t: Island, turn: Turn) -> None:
    if t.fleet.is_first and t.saves is None:
        t.saves = t.new_saves(t.taken)
    elif not t.fleet.is_first and t.saves is not None:
        _not_first(t)
    t.took_part(t.taken, turn)


def _not_first(t: Island) -> None:
    if t.saves is not None:
        t.saves.close()
        t.saves = None


def _leave_if_told(t: Island, number: int) -> None:
    """Told to stop, an island leaves; the last one saves first. One that is too slow leaves too, if others are left."""
    told, slow = t.place.sum(float(t.told_to_stop()), float(t.too_slow))
    t.too_slow = False
    if slow and not told and t.fleet.leave():
        raise TooSlow
    if not told:
        return
    left = t.fleet.leave()
    if left is None:
        return
    if left:
        raise Stopped(f"island {t.fleet.island} has left after step {t.taken}; the others go on.")
    turn = t.fleet.take(number, t)
    assert turn is not None
    _begin_epoch(t, turn)
    assert t.saves is not None
    t.saves.now(t.taken, must=False)
    total, name = t.run.steps, t.run.name
    raise Stopped(f"stopped after step {t.taken} of {total}; the state is saved, `shoal resume {name}` goes on.")
