"""What goes into the journal of links, and what does not."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from shoal.net.api import Event

MOST_REFUSALS = 10  # a second
KINDS = ("link_refused", "frame_refused", "handler_failed")


class Limited:
    """For the journal, which strangers must not be able to fill: ten of a kind a second, the others are counted."""

    def __init__(self, event: Event, kinds: tuple[str, ...] = KINDS) -> None:
        self._event, self._kinds = event, kinds
        self._second, self._counts, self._left_out = 0, Counter[str](), Counter[str]()

    def __call__(self, kind: str, **fields: Any) -> None:
        if kind in self._kinds:
            second = int(time.monotonic())
            if second != self._second:
                self._second, self._counts = second, Counter()
            self._counts[kind] += 1
            if self._counts[kind] > MOST_REFUSALS:
                self._left_out[kind] += 1
                return
            if left_out := self._left_out.pop(kind, 0):
                fields["left_out"] = left_out
        self._event(kind, **fields)
