"""The training loop, top to bottom.

A step is a transaction: its samples are a pure function of the step's number, its gradient is the gradient of the
mean loss over all target tokens of the global batch, and it is committed by one journal record. Whatever happens in
between, a step without a record was never taken.
"""

from __future__ import annotations

from shoal.errors import NumericsError, Stopped
from shoal.track.journal import Record
from shoal.train.amount import amount, read_fields
from shoal.train.balance import balance
from shoal.train.clock import Clock
from shoal.train.hooks import Moment
from shoal.train.numerics import NotFinite
from shoal.train.schedule import lr_ratio
from shoal.train.training import Training as Training  # those who take steps one by one make one


def train(t: Training, first_step: int) -> None:
    """Runs steps `first_step` … `train.steps` - 1. Raises Stopped when told to stop, saved; Rewind after a spike."""
    total = t.run.steps
    t.hooks.start(t.model, first_step)
    try:
        for step in range(first_step, total):
            record = train_step(t, step)
            if record is None:
                t.pulse.mark("save")
                t.saves.now(step, must=False)
                raise Stopped(
                    f"stopped after step {step} of {total}; the state is saved, `shoal resume {t.run.name}` goes on."
                )
            t.tell("step", **record)
            t.hooks.step(Moment(step + 1, t.numerics.skips.batch_of(step)), record)
            t.hooks.save(step + 1)
        if first_step < total:
            t.hooks.end(total)
        t.pulse.mark("save")
        t.saves.now(total, must=True)  # also where the last step was found in memory: it is the end when it is on disk
    finally:
        t.hooks.close()


def train_step(t: Training, step: int) -> Record | None:
    """One optimizer step, with the next batch whose numbers are numbers; None when told to stop before it began."""
    while True:
        try:
            return _try_step(t, step)
        except NotFinite as wrong:
            t.saves.heard(*t.exchange.join())
            t.numerics.skip(step, wrong)


def _try_step(t: Training, step: int) -> Record | None:
    clock, shape = Clock(t.pulse, step, t.timeline), t.model.shape
    batch = t.numerics.skips.batch_of(step)
    at, coming = Moment(step, batch), t.numerics.skips.batch_of(step + 1) if step + 1 < t.run.steps else None
    micro_batches = t.step.samples(at, t.feed.step(batch))
    ahead = [] if coming is None else t.feed.look_ahead(coming)
    clock.lap("data_s", then="exchange")

    # What the whole batch asks for was summed during the step before, and that of the next one is during this one.
    known, stop = t.exchange.of(t.place, batch, lambda: amount(shape, micro_batches), told := t.told_to_stop())
    if stop:
        return None
    if t.numerics.alarm():
        t.numerics.go_back(step)
    if not known.targets:
        raise NumericsError(f"step {step + 1} has no target token: the data's loss mask hides its whole batch.")
    t.exchange.begin(t.place, coming, amount(shape, ahead), told, t.saves.votes(step))

    loss = t.step.gradient(at, (step, t.place.at["dp"]), micro_batches, clock, known.token_weight)
    ratio = lr_ratio(t.run.train.schedule, step, t.run.steps)
    taken = t.step.update(at, loss, known.targets, ratio, clock, settle=t.saves.settle)
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
