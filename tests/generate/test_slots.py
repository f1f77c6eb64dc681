"""Places of the cache: whoever comes and goes, none is lost, none is given twice, and what is reused is right."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shoal.generate.slots import Seat, Slots

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


class Places(RuleBasedStateMachine):
    """Beside it a cache whose rows hold the tokens themselves: what a row says must be what it holds."""

    seats = Bundle("seats")

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, int]]] = [[] for _ in range(3)]
        self.slots = Slots(3, self.copy)
        self.taken: set[int] = set()

    def copy(self, source: int, target: int, tokens: int) -> None:
        assert target not in self.taken
        self.rows[target] = self.rows[source][:tokens]

    @rule(target=seats, tokens=TEXTS, version=st.sampled_from("ab"))
    def admit(self, tokens: list[int], version: str) -> Seat | None:
        seat = self.slots.admit(tokens, version)
        assert (seat is None) == (len(self.taken) == 3)
        if seat is None:
            return None
        assert seat.number not in self.taken
        assert seat.cached < len(tokens)  # the last one is computed: its logits are wanted
        self.taken.add(seat.number)
        row = self.rows[seat.number] = self.rows[seat.number][: seat.cached]
        assert row == [(version, token) for token in tokens[: seat.cached]]
        row += [(version, token) for token in tokens[seat.cached :]]
        seat.tokens += tokens[seat.cached :]
        return seat

    @rule(seat=seats, token=st.integers(0, 2))
    def write(self, seat: Seat | None, token: int) -> None:
        if seat is not None and seat.taken:
            seat.tokens.append(token)
            self.rows[seat.number].append((seat.version, token))

    @rule(seat=consumes(seats))
    def release(self, seat: Seat | None) -> None:
        if seat is not None and seat.taken:
            self.slots.release(seat)
            self.taken.discard(seat.number)

    @rule()
    def forget(self) -> None:
        self.slots.forget()

    @invariant()
    def rows_hold_what_is_said(self) -> None:
        assert {seat.number for seat in self.slots.seats if seat.taken} == self.taken
        for seat in self.slots.seats:
            assert [(seat.version, token) for token in seat.tokens] == self.rows[seat.number][: len(seat.tokens)]


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
