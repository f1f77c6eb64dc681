"""Checkpoints and failures: how large a save is, how often it is asked for, what failures leave."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.plan.review.finding import HURTS, Finding, Severity, costing, percent
from shoal.plan.review.subject import Subject
from shoal.plan.verdict import SAVED_BYTES, save_s
from shoal.readable import duration, size
from shoal.spec.duration import seconds as seconds_of
from shoal.spec.duration import written

# Of the time of all devices; what a plan of failures says is nearer than what one of speed does.
WORTH_OF_GOODPUT = 0.01


def saves(s: Subject) -> Iterator[Finding]:
    """An interval that is named, beside the best one."""
    every, keeps = s.run.checkpoint.every, s.run.checkpoint
    writes_s = save_s(s.shape.params, s.nodes, far=not keeps.local)
    saved = size(SAVED_BYTES * s.shape.params)
    blocking_s = None if keeps.background else writes_s
    best = s.goodput(writes_s, blocking_s)
    if every == "auto":
        return
    whole_s = s.run.steps * s.found.seconds
    asked_s = seconds_of(every) if isinstance(every, str) else every * s.found.seconds or whole_s
    takes_s = max(min(asked_s, whole_s), writes_s)  # one begins when the last one is safe
    given = s.goodput(writes_s, blocking_s, takes_s)
    lost = best.expected - given.expected
    how = f"every {every}" if isinstance(every, str) else f"every {every:,} steps" if every else "at the end only"
    if asked_s < writes_s and keeps.background:
        yield Finding(
            Severity.NOTE,
            "save-longer-than-interval",
            ("checkpoint.every",),
            f"A save of {saved} takes {duration(writes_s)} to write from {s.nodes:,} nodes, and checkpoint.every asks "
            f"for one {how} ({duration(asked_s)}): the next waits until the last is safe.",
            f"checkpoint.every auto ({duration(best.interval_s)} here).",
        )
    if lost >= WORTH_OF_GOODPUT:
        yield Finding(
            Severity.HURTS if lost >= HURTS else Severity.NOTE,
            "save-interval",
            ("checkpoint.every", "checkpoint.background"),
            f"Saves of {saved} {how} ({duration(takes_s)}) leave {given.expected:.1%} of the time for steps that "
            f"count, with a failure every {duration(given.mttf_s)} on {s.asked.devices:,} devices; the best interval, "
            f"{duration(best.interval_s)}, leaves {best.expected:.1%}.",
            f"checkpoint.every auto, or {written(max(1, round(best.interval_s)))}.",
            lost,
        )


def waiting_for_saves(s: Subject) -> Iterator[Finding]:
    """Saves that training waits for."""
    if s.run.checkpoint.background:
        return
    writes_s = save_s(s.shape.params, s.nodes, far=not s.run.checkpoint.local)
    lost = s.goodput(writes_s).expected - s.goodput(writes_s, writes_s).expected
    if costing(lost) is not None:
        yield Finding(
            Severity.HURTS if lost >= HURTS else Severity.NOTE,
            "waiting-for-saves",
            ("checkpoint.background",),
            f"checkpoint.background false makes training wait {duration(writes_s)} for every save of "
            f"{size(SAVED_BYTES * s.shape.params)}, which costs {percent(lost)} of the time at the best interval.",
            "checkpoint.background true.",
            lost,
        )


def failures(s: Subject) -> Iterator[Finding]:
    good = s.goodput()
    lost = 1 - good.expected
    if lost >= HURTS:
        yield Finding(
            Severity.HURTS,
            "failures",
            ("plan.style", "fleet.islands"),
            f"Something fails every {duration(good.mttf_s)} on {s.asked.devices:,} devices, and coming back "
            f"({s.style.name}) leaves {good}: {good.advice}.",
            "`shoal plan goodput` compares the ways of coming back; fleet.islands go on without the lost one.",
            lost,
        )
