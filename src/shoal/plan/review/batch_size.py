"""Batches that are too small for so many devices: traffic that nothing hides, steps that are mostly starts."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.plan.explain import CALLED
from shoal.plan.review.finding import WORTH, Finding, costing, percent
from shoal.plan.review.subject import Subject

# Parts that a larger batch spreads over more work.
SPREAD = ("data", "host", "update")


def small_batch(s: Subject) -> Iterator[Finding]:
    batch, devices = s.run.train.batch, s.asked.devices
    seen = {name: s.part(name) for name in SPREAD if s.part(name) >= WORTH / 2}
    # A batch below the devices forces axes that nobody would choose. Bubbles and islands have rules of their own.
    elsewhere = max(s.part("pipeline"), s.part("islands"))
    if (not seen and batch >= devices) or elsewhere > sum(seen.values()):
        return
    twice = s.best(run=s.with_batch(2 * batch))
    if twice is None:
        return
    gain = 2 * s.found.seconds / twice.seconds - 1
    severity = costing(gain)
    if severity is None:
        return
    windows = f"{batch / devices:.3g} window{'s' * (batch != devices)} of {s.run.data.seq_len:,} tokens"
    each = f"is {windows} for each of {devices:,} devices"
    if batch < devices:
        each = f"is less than the {devices:,} devices, which have to share windows of {s.run.data.seq_len:,} tokens"
    parts = " and ".join(
        f"{CALLED[name]} {percent(share)}" for name, share in sorted(seen.items(), key=lambda x: -x[1])
    )
    spent = f"; more work per step would share what is the same for any batch ({parts} of a step)" if parts else ""
    yield Finding(
        severity,
        "small-batch",
        ("train.batch",),
        f"train.batch {batch:,} {each}{spent}. Twice the batch would train {percent(gain)} more tokens per second.",
        f"train.batch {2 * batch:,}, as far as the loss allows it, or fewer devices.",
        gain / (1 + gain),
    )
