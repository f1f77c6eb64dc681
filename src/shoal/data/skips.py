"""Which batch of the order a step reads, when some are left out. Pure; no torch here.

The order of the data stays a function: batch b is the samples [b·B, (b+1)·B) of it, whoever reads them. A run that has
left out batches 7 and 8 reads batch 9 in its step 7 (steps and batches are counted from 0), and so does every run that
was told to leave them out from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable

Spans = list[list[int]]  # [first, last] each, both left out; sorted and apart, as JSON has them


class Skips:
    """The batches that a run leaves out."""

    def __init__(self, spans: Iterable[Iterable[int]] = ()) -> None:
        self.spans: Spans = _merged([[first, last] for first, last in spans])

    def batch_of(self, step: int) -> int:
        """The batch that a step reads: the `step`-th of those that are not left out."""
        batch = step
        for first, last in self.spans:
            if first > batch:
                break
            batch += last - first + 1
        return batch

    def add(self, first: int, last: int | None = None) -> None:
        """Leaves out the batches from `first` through `last` (`first` alone unless told)."""
        self.spans = _merged([*self.spans, [first, first if last is None else last]])

    def resume(self, saved: Iterable[Iterable[int]], step: int, heard: Iterable[Iterable[int]] = ()) -> None:
        """Goes on from a checkpoint of `step`: what it read and left out until then it alone knows (`saved`); of what
        lies ahead of it, `heard` counts too: what the journal tells, or who rewinds knows."""
        known = Skips(saved)
        ahead = known.batch_of(step)
        for first, last in heard:
            if last >= ahead:
                known.add(max(first, ahead), last)
        self.spans = known.spans

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.spans)


def _merged(spans: Spans) -> Spans:
    merged: Spans = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1] + 1:
            merged[-1][1] = max(b, merged[-1][1])
        else:
            merged.append([a, b])
    return merged
