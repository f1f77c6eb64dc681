"""What goes into the journal of links, and what does not."""

from __future__ import annotations

import time
from typing import Any

from shoal.fleet.net.api import Event

MOST_REFUSALS = 10  # a second


class Limited:
    """For the journal, which strangers must not be able to fill: ten refusals a second, the others are counted."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._second, self._count, self._left_out = 0, 0, 0

    def __call__(self, kind: str, **fields: Any) -> None:
        if kind in ("link_refused", "frame_refused"):
            second = int(time.monotonic())
            self._count = self._count + 1 if second == self._second else 1
            self._second = second
            if self._count > MOST_REFUSALS:
                self._left_out += 1
                return
            if self._left_out:
                fields["left_out"], self._left_out = self._left_out, 0
        self._event(kind, **fields)
