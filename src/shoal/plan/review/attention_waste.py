"""Attention that computes what no token sees: sliding windows and packed documents where nothing skips them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.plan.documents import WHOLE, of_windows, skips_between
from shoal.plan.review.finding import Finding, costing, percent
from shoal.plan.review.subject import Subject


def unseen_tokens(s: Subject) -> Iterator[Finding]:
    """A shared sequence is masked, not skipped; so is a window of a model that keeps documents together."""
    run, asked, seq = s.run, s.asked, s.run.data.seq_len
    if asked.machine.cpu:
        return
    window, cp = s.shape.sliding_window, s.sizes.cp
    slides = window is not None and window < seq
    skips = skips_between(run, s.shape, True, asked.precision)
    if cp == 1 and (skips or not slides):
        return  # that heads of odd widths skip no documents is told by `odd_heads`
    whole = seq / 2
    least = asked.seen.computed
    if asked.seen.basis == WHOLE:
        least = of_windows(s.shape, [np.array([seq])], WHOLE).computed
    share = s.part("attention") * max(0.0, 1 - least / whole)
    severity = costing(share)
    if severity is None:
        return
    why = f"mesh.cp {cp} cuts the sequence" if cp > 1 else "this run tells them apart by a mask"
    ways = ["mesh.cp 1 (mesh.tp or mesh.recompute for the memory)"] * (cp > 1)
    ways += ["data.mask_documents true in bf16 with train.kernels auto"] * (not skips)
    what = f"model.sliding_window {window:,}" if slides else f"data.mask_documents ({asked.seen.basis})"
    yield Finding(
        severity,
        "unseen-tokens",
        ("model.sliding_window", "mesh.cp", "data.mask_documents"),
        f"{what} leaves a token {asked.seen.seen:,.0f} others to see on average, but {why}, where nothing is skipped: "
        f"{whole:,.0f} are computed for it, and {percent(share)} of a step is for nothing.",
        f"{' and '.join(ways)}: the kernel for documents skips what is not seen.",
        share,
    )
