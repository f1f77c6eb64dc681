"""Which checkpoints stay, and which may be deleted: never the newest good one. Nothing is read or deleted here.

`keepers` is what the run file asks for. `deletable` is what may go, and it is stricter: a checkpoint that is wanted but
damaged must not be the reason to delete a good one, so nothing is deleted that is newer than the newest good one, and
nothing at all where none is known to be good to its last byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Candidate:
    """A published checkpoint on the history of the run. The same step of a later term is the newer one."""

    step: int
    term: int
    metric: float | None = field(default=None, compare=False)  # the eval loss at that step; lower is better


def keepers(candidates: Iterable[Candidate], keep: int, keep_every: int = 0, keep_best: int = 0) -> set[Candidate]:
    """The newest `keep` (at least one), the first at or after each multiple of `keep_every`, the best `keep_best`."""
    newest = sorted(candidates, reverse=True)
    # At or after: a save that had to wait for the one before it is a few steps late.
    milestones = {c.step // keep_every: c for c in newest if keep_every > 0 and c.step >= keep_every}.values()
    best = sorted(((c.metric, i) for i, c in enumerate(newest) if c.metric is not None and not math.isnan(c.metric)))
    return {*newest[: max(keep, 1)], *milestones, *(newest[i] for _, i in best[: max(keep_best, 0)])}


def deletable(
    candidates: Iterable[Candidate],
    keep: int,
    keep_every: int = 0,
    keep_best: int = 0,
    *,
    verified: Callable[[Candidate], bool],
) -> list[Candidate]:
    """What may go, oldest first, so that whatever stops the deletion has cost the least.

    `verified` says whether one is good to its last byte. It is asked from the newest on and only until it says yes: in
    a healthy run that is one question, about the checkpoint that has just been written.
    """
    candidates = list(candidates)
    newest_good = next((c for c in sorted(candidates, reverse=True) if verified(c)), None)
    if newest_good is None:
        return []
    stay = keepers(candidates, keep, keep_every, keep_best)
    return sorted(c for c in candidates if c < newest_good and c not in stay)
