"""A run that has begun gets another length or schedule: what it had goes to its past, and the rate goes on from there.

Refused without a choice (`train.schedule.prolong`) where the rate would jump. No torch: `show` and `resume` call this.
"""

from __future__ import annotations

import math

from shoal.errors import SpecError, UsageError
from shoal.spec.length import decay_steps, warmup_steps
from shoal.spec.run import Run
from shoal.spec.schedule import MOST_PAST, Past, Prolong, Schedule
from shoal.train.schedule import lr_ratio

SAME = 1e-9  # relative: two rates of one schedule, rounded otherwise


def prolonged(before: Run, asked: Run, step: int) -> Run:
    """The run as asked for, after `step` steps of the run as it was before, whose lengths are both known."""
    if asked.own.schedule is not None:
        return asked  # by a function of the step and of the length, whatever it makes of another one
    was, now = before.train.schedule, asked.train.schedule
    if now.past and now.past[: len(was.past)] != was.past:
        raise SpecError(
            f"train.schedule.past of run '{asked.name}' tells of another history than its run directory; remove it."
        )
    if len(now.past) > len(was.past):
        return asked  # by whoever sent it, who saw the same history
    kept = _with(asked, past=was.past)
    changed = _course(before) != _course(asked)
    choice = now.prolong if changed or now.prolong != was.prolong else None
    if not 0 < step < asked.steps or not (changed or choice):
        return kept
    had, would = lr_ratio(was, step, before.steps), lr_ratio(kept.train.schedule, step, asked.steps)
    if choice is None and not math.isclose(had, would, rel_tol=SAME):
        raise UsageError(_jumps(asked, step, had, would))
    if len(was.past) == MOST_PAST:
        raise UsageError(
            f"run '{asked.name}' was prolonged {MOST_PAST} times, which is the most; export its weights and start anew."
        )
    _refuse_what_cannot(asked, step, had, choice)
    piece = Past(
        until=step,
        steps=before.steps,
        name=was.name,
        warmup_steps=warmup_steps(was.warmup_steps, before.steps),
        decay_steps=was.decay_steps,
        min_ratio=was.min_ratio,
        then=choice,
    )
    return _with(asked, past=(*was.past, piece))


def way_on(run: Run, step: int, steps: int) -> str:
    """What to give to `shoal resume` for so many steps in all: it is accepted as it stands here."""
    schedule, longer = run.train.schedule, f"train.steps={steps}"
    if run.own.schedule is not None:
        return longer
    had = lr_ratio(schedule, step, run.steps)
    if schedule.prolong or math.isclose(had, lr_ratio(schedule, step, steps), rel_tol=SAME):
        return longer
    if had > 0:
        return f"{longer} train.schedule.prolong=keep"
    warmup = "" if schedule.warmup_steps else " train.schedule.warmup_steps=1%"
    return f"{longer} train.schedule.prolong=rewarm{warmup}"


def _refuse_what_cannot(asked: Run, step: int, had: float, choice: Prolong | None) -> None:
    schedule = asked.train.schedule
    if choice == "keep" and had == 0:
        raise UsageError(
            f"train.schedule.prolong keep: the rate at step {step} is 0, and nothing would be learnt; take rewarm."
        )
    if choice == "decay" and had <= schedule.min_ratio:
        raise UsageError(
            f"train.schedule.prolong decay: the rate at step {step} is at {had:g} of the peak, and does not fall to "
            f"train.schedule.min_ratio {schedule.min_ratio:g}; lower that, or take keep."
        )
    if choice == "rewarm":
        rest = asked.steps - step
        warmup = warmup_steps(schedule.warmup_steps, rest)
        decay = decay_steps(schedule.decay_steps, rest) if schedule.name == "wsd" else 0
        if not 0 < warmup < rest or warmup + decay > rest:
            raise UsageError(
                f"train.schedule.prolong rewarm: train.schedule.warmup_steps is {warmup}, and must be at least 1 and "
                f"fit into the {rest} steps that are left{' with the decay' * bool(decay)}; set it, such as 5% of them."
            )


def _jumps(asked: Run, step: int, had: float, would: float) -> str:
    lr = asked.train.optimizer.lr
    return (
        f"the learning rate at step {step:,} would jump from {had * lr:.3g} to {would * lr:.3g}; choose "
        f"train.schedule.prolong=keep (stays at {had * lr:.3g}), rewarm (warms up from there to {lr:.3g} over "
        "train.schedule.warmup_steps, and goes through the schedule again), decay (falls from there to "
        "train.schedule.min_ratio of the peak at the end) or jump."
    )


def _course(run: Run) -> tuple[object, ...]:
    """What the rate of each step follows from; counts, not shares, so that a share that was closed is no change."""
    s, steps = run.train.schedule, run.steps
    return s.name, warmup_steps(s.warmup_steps, steps), decay_steps(s.decay_steps, steps), s.min_ratio, steps


def _with(run: Run, **schedule: object) -> Run:
    changed = run.train.schedule.model_copy(update=schedule)
    return run.model_copy(update={"train": run.train.model_copy(update={"schedule": changed})})


def once(run: Run, before: Schedule) -> Run:
    """The choice was for this time: the next one is asked for again."""
    return _with(run, prolong=before.prolong)
