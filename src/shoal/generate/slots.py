"""Who sits where: rows of a cache, one for each request, and what older requests have left in them.

A row keeps its tokens after its request has ended, until another one needs the place: a request that begins with the
same tokens, under the same weights, does not compute them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Seat:
    number: int
    version: str = ""
    tokens: list[int] = field(default_factory=list)
    """Those whose keys and values the row holds."""
    cached: int = 0
    """How many of a prompt were there when its request came."""
    taken: bool = False
    used: int = 0
    """When it was last asked for, counted in requests."""


class Slots:
    def __init__(self, count: int, copy: Callable[[int, int, int], None] | None) -> None:
        """`copy(source, target, tokens)` copies the beginning of a row; None: nothing is shared (a state of all tokens
        has no beginning)."""
        self.seats = [Seat(number) for number in range(count)]
        self._copy, self._clock = copy, 0
        self.asked = self.hits = 0  # tokens of prompts, and those of them that were there

    def admit(self, tokens: Sequence[int], version: str) -> Seat | None:
        """A row for these tokens; None while all are taken."""
        free = [seat for seat in self.seats if not seat.taken]
        if not free:
            return None
        self._clock += 1
        source, common = self._longest(tokens, version)
        if source is not None and not source.taken and common == len(source.tokens):
            seat = source
        else:
            seat = min(free, key=lambda one: (bool(one.tokens), one.used, one.number))
            if source is not None and seat is not source:
                assert self._copy is not None
                self._copy(source.number, seat.number, common)
        seat.tokens, seat.version, seat.cached = list(tokens[:common]), version, common
        seat.taken, seat.used = True, self._clock
        self.asked, self.hits = self.asked + len(tokens), self.hits + common
        return seat

    def release(self, seat: Seat) -> None:
        seat.taken = False
        if self._copy is None:
            seat.tokens = []

    def forget(self) -> None:
        """What nobody uses: of weights that are no longer there."""
        for seat in self.seats:
            if not seat.taken:
                seat.tokens = []

    def _longest(self, tokens: Sequence[int], version: str) -> tuple[Seat | None, int]:
        """The row with the longest common beginning. The last token of a prompt is always computed: its logits are
        what the answer begins with."""
        best, most = None, 0
        for seat in self.seats if self._copy is not None else ():
            if seat.version == version:
                common = _common(seat.tokens, tokens, len(tokens) - 1)
                if common > most or (common == most and best is not None and best.taken and not seat.taken):
                    best, most = (seat, common) if common else (best, most)
        return best, most


def _common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    n = min(len(a), len(b), most)
    if list(a[:n]) == list(b[:n]):  # the usual case is quick
        return n
    return next(i for i in range(n) if a[i] != b[i])
