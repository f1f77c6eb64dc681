"""The training loop, top to bottom.

A step is a transaction: its samples are a pure function of the step's number, its gradient is the gradient of the
mean loss over all target tokens of the global batch, and it is committed by one journal record. Whatever happens in
between, a step without a record was never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from shoal.data.windows import Batch
from shoal.errors import NumericsError, SpecError, Stopped
from shoal.journal.journal import Record
from shoal.train.amount import amount, read_fields
from shoal.train.balance import balance
from shoal.train.clock import Clock
from shoal.train.hooks import Moment
from shoal.train.numerics import NotFinite
from shoal.train.training import Training as Training  # those who take steps one by one make one

Backward = Callable[[list[Batch]], Tensor]
Gradient = Callable[[list[Batch], Backward], Tensor]
"""Of somebody's own: puts the gradient of these samples into the parameters and returns the sum of their losses, both
with the function that it is given."""


def train(t: Training, first_step: int) -> None:
    """Runs steps `first_step` … `train.steps` - 1. Raises Stopped when told to stop, saved; Rewind after a spike."""
    for step in steps(t, first_step):
        take(t, step)


def steps(t: Training, first_step: int) -> Iterator[int]:
    """The steps that are left, one after the other, for whoever takes them; around them all that is not a step."""
    total = t.run.steps
    t.taken = first_step
    t.hooks.start(t.model, first_step)
    try:
        while t.taken < total:
            step = t.taken
            yield step
            if t.taken != step + 1:
                raise SpecError(f"step {step + 1} was not taken: the loop of a session takes each step once.")
            settle(t)
        if first_step < total:
            t.hooks.end(total)
            t.log()
        t.pulse.mark("save")
        t.saves.now(total, must=True)  # also where the last step was found in memory: it is the end when it is on disk
    finally:
        t.hooks.close()


def settle(t: Training) -> None:
    """What comes after a step: what was said of it is written down, and a save that is due begins."""
    t.log()
    t.hooks.save(t.taken)


def take(t: Training, step: int, gradient: Gradient | None = None) -> Record:
    """One step, told to the journal and to all hooks. `gradient`: in the place of the step's own."""
    record = train_step(t, step, gradient)
    if record is None:
        t.pulse.mark("save")
        t.saves.now(step, must=False)
        raise Stopped(
            f"stopped after step {step} of {t.run.steps}; the state is saved, `shoal resume {t.run.name}` goes on."
        )
    t.tell("step", **record)
    t.taken = step + 1
    t.hooks.step(Moment(step + 1, t.numerics.skips.batch_of(step)), record)
    return record


def train_step(t: Training, step: int, gradient: Gradient | None = None) -> Record | None:
    """One optimizer step, with the next batch whose numbers are numbers; None when told to stop before it began."""
    while True:
        try:
            return _try_step(t, step, gradient)
        except NotFinite as wrong:
            t.saves.heard(*t.exchange.join())
            t.numerics.skip(step, wrong)


def _try_step(t: Training, step: int, gradient: Gradient | None) -> Record | None:
    clock, shape = Clock(t.pulse, step, t.timeline), t.model.shape
    batch = t.numerics.skips.batch_of(step)
    at, coming = Moment(step, batch), t.numerics.skips.batch_of(step + 1) if step + 1 < t.run.steps else None
    micro_batches = t.step.samples(at, t.feed.step(batch))
    ahead = [] if coming is None else t.feed.look_ahead(coming)
    clock.lap("data_s", then="exchange")

    # What the whole batch asks for was summed during the step before, and that of the next one is during this one.
    known, stop = t.exchange.of(t.place, batch, lambda: amount(t.model, micro_batches), told := t.told_to_stop())
    if stop:
        return None
    if t.numerics.alarm():
        t.numerics.go_back(step)
    if not known.targets:
        raise NumericsError(f"step {step + 1} has no target token: the data's loss mask hides its whole batch.")
    t.exchange.begin(t.place, coming, amount(t.model, ahead), told, t.saves.votes(step))

    summed = partial(t.step.gradient, at, (step, t.place.at["dp"]), clock=clock, token_weight=known.token_weight)
    loss = (gradient or _as_it_is)(micro_batches, summed)
    taken = t.step.update(at, loss, known.targets, t.rate(step), clock, settle=t.saves.settle)
    routing = balance(t.model, step + 1, t.tell)
    clock.mark("exchange")
    t.saves.heard(*t.exchange.join())
    clock.lap("optimizer_s", then="record")
    return {
        "step": step + 1,
        "begin": clock.begin,
        **read_fields(t.run, shape, batch, known),
        **taken._asdict(),
        **clock.fields(),
        **routing,
    }


def _as_it_is(batches: list[Batch], backward: Backward) -> Tensor:
    return backward(batches)
