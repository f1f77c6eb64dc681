"""One peer's side of the outer step: what it hands in, and how its own weights follow the others'.

A peer trains on while its part travels. Until the record of a round comes it stands where its own training has led it,
as if all the others had done the same ("pending"); with the record its weights are moved by what theta has really done,
less what it had assumed. So at any time

    weights = theta + pending of all rounds that are under way + the progress of the round that is being trained,

and the part of a round is that progress, less what is pending: nothing is counted twice, however late records are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shoal.swarm.outer.exact import F32
from shoal.swarm.outer.outer import Applied, Outer
from shoal.swarm.outer.robust import Payload

Move = tuple[slice, F32]  # to be added to the weights there


class Local:
    def __init__(self, outer: Outer) -> None:
        self.outer = outer
        self.residual = np.zeros(outer.count, np.float32) if outer.rule.feedback else None
        self._pending: dict[int, Move] = {}  # round → what this peer's own part has assumed of it
        self._returned: list[tuple[int, Payload]] = []  # (round, part)

    def part(self, round: int, weights: F32) -> bytes:
        """What this peer hands in for a round that ends with these weights. ValueError where they are not finite."""
        rule, where = self.outer.rule, self.outer.rule.fragment(round, self.outer.count)
        progress = self._stand(where)
        progress -= weights[where]  # theta less the weights: a gradient
        if not np.isfinite(progress).all():
            raise ValueError(f"the weights of round {round} are not finite.")
        pending = (where, -progress)
        for at, payload in self._returned:
            if at % rule.fragments == round % rule.fragments:
                self.outer.codec.add(payload, progress, 1.0)
        residual = None if self.residual is None else self.residual[where]
        payload = self.outer.codec.encode(progress, residual, rule.feedback)
        self._returned = [r for r in self._returned if r[0] % rule.fragments != round % rule.fragments]
        self._pending[round] = pending
        return payload

    def returned(self, round: int, payload: Payload) -> None:
        """A part was not taken: it travels with the next one of its fragment."""
        self._returned.append((round, payload))

    def follow(self, applied: Applied) -> list[Move]:
        """What is to be added to the weights once a record is in theta."""
        return self._settle(applied.round, applied.where, applied.moved)

    def follow_merge(self, round: int, before: F32, after: F32) -> list[Move]:
        """The same when theta has become that of a merge."""
        return self._settle(round, slice(0, len(after)), after - before)

    def forget(self) -> None:
        """The weights are theta's again, and nothing is under way."""
        self._pending.clear()
        self._returned.clear()
        if self.residual is not None:
            self.residual[:] = 0

    def _stand(self, where: slice) -> F32:
        """Where this peer assumes theta to be."""
        at = self.outer.theta[where].copy()
        for there, assumed in self._pending.values():
            if there == where:
                at += assumed
        return at

    def _settle(self, round: int, where: slice, moved: F32) -> list[Move]:
        moves = [(where, moved)]
        for at in [at for at in self._pending if at <= round]:
            there, assumed = self._pending.pop(at)
            moves.append((there, -assumed))
        return moves


def add(moves: Iterable[Move], weights: F32) -> None:
    for where, by in moves:
        weights[where] += by
