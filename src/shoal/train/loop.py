"""The training loop, top to bottom.

A step is a transaction: its samples are a pure function of the step's number, its gradient is the gradient of the
mean loss over all target tokens of the global batch, and it is committed by one journal record. Whatever happens in
between, a step without a record was never taken.
"""

from __future__ import annotations

from contextlib import nullcontext

from shoal.checkpoint import faults
from shoal.errors import NumericsError, Stopped
from shoal.parallel.clip import read_later, unless_finite
from shoal.parallel.count import Counter, due, together
from shoal.track.journal import Record
from shoal.train import collect
from shoal.train.amount import amount, read_fields
from shoal.train.balance import balance, forget
from shoal.train.clock import Clock
from shoal.train.numerics import NotFinite
from shoal.train.schedule import lr_ratio
from shoal.train.seed import seed_step
from shoal.train.training import Training as Training  # those who take steps one by one make one


def train(t: Training, first_step: int) -> None:
    """Runs steps `first_step` … `train.steps` - 1. Raises Stopped when told to stop, saved; Rewind after a spike."""
    run, total = t.run, t.run.steps
    counter, experts = Counter(t.place), t.run.model.experts is not None
    for step in range(first_step, total):
        count = t.place.world > 1 and due(step - first_step, total - step, varies=experts)
        with counter.counting() if count else nullcontext():
            record = train_step(t, step)
        if record is None:
            t.pulse.mark("save")
            t.saves.now(step, must=False)
            raise Stopped(
                f"stopped after step {step} of {total}; the state is saved, `shoal resume {run.name}` goes on."
            )
        t.tell("step", **record)
        t.numerics.taken(step + 1, record["loss"], record["grad_norm"])
        done = step + 1
        if count:
            t.tell("traffic", step=done, world=t.place.world, rows=together(counter.table()))
        if (every := run.eval.every) and done % every == 0 and done < total:
            t.pulse.mark("evaluate")
            t.evaluate(done)
        if done < total:
            t.pulse.mark("save")
            t.saves.after(done)
        collect.after(done)
    if first_step < total:
        t.pulse.mark("evaluate")
        t.evaluate(total)
    t.pulse.mark("save")
    t.saves.now(total, must=True)  # also where the last step was found in memory: it is the end when it is on disk


def train_step(t: Training, step: int) -> Record | None:
    """One optimizer step, with the next batch whose numbers are numbers; None when told to stop before it began."""
    while True:
        try:
            return _try_step(t, step)
        except NotFinite as wrong:
            t.saves.heard(*t.exchange.join())
            t.numerics.skip(step, wrong)
            t.optimizers.forget(taken=step)
            forget(t.model)


def _try_step(t: Training, step: int) -> Record | None:
    clock, shape = Clock(t.pulse, step, t.timeline), t.model.shape
    faults.reach("step")
    seed_step(t.run.seed, step, t.place.at["dp"])
    batch, coming = t.numerics.skips.batch_of(step), t.numerics.skips.batch_of(step + 1)
    micro_batches = t.poison.batches(batch, t.feed.step(batch), shape.vocab_size)
    ahead = t.feed.look_ahead(coming) if step + 1 < t.run.steps else []
    clock.lap("data_s", then="exchange")

    # What the whole batch asks for was summed during the step before, and that of the next one is during this one. Loss
    # normalised by its count of targets is right for any split, packing and mask.
    known, stop = t.exchange.of(t.place, batch, lambda: amount(shape, micro_batches), told := t.told_to_stop())
    if stop:
        return None
    if t.numerics.alarm():
        t.numerics.go_back(step)
    if not (targets := known.targets):
        raise NumericsError(f"step {step + 1} has no target token: the data's loss mask hides its whole batch.")
    t.exchange.begin(t.place, coming, amount(shape, ahead), told, t.saves.votes(step))

    # The gradient of the sum over all targets, whatever the mesh; divided by their number in the clipping.
    part = t.model.backward(micro_batches, clock.mark, known.token_weight)
    clock.mark("clip")
    loss = t.model.total(part) / targets
    t.poison.gradients(batch, (p for _, p in t.model.named_parameters()))
    grad_norm, factor = t.model.norm(1 / targets, t.run.train.clip)
    # Where the update can skip itself it is launched before the host knows the numbers: no GPU waits for that.
    numbers = read_later(loss, grad_norm)
    if not t.optimizers.skips_by_itself:
        t.numerics.check(batch, numbers(), clock.begin)
    clock.lap("compute_s", then="optimizer")
    t.saves.settle()
    factor = unless_finite(factor, loss, grad_norm)
    lr = t.optimizers.step(lr_ratio(t.run.train.schedule, step, t.run.steps), factor)
    t.model.spread()
    t.pulse.mark("clip")
    loss_now, norm_now = t.numerics.check(batch, numbers(), clock.begin)  # here alone the host waits for a GPU
    t.pulse.mark("optimizer")
    routing = balance(t.model, step + 1, t.tell)
    clock.mark("exchange")
    t.saves.heard(*t.exchange.join())
    clock.lap("optimizer_s", then="record")
    return {
        "step": step + 1,
        "begin": clock.begin,
        **read_fields(t.run, shape, batch, known),
        "loss": loss_now,
        "grad_norm": norm_now,
        "lr": lr,
        **clock.fields(),
        **routing,
    }
