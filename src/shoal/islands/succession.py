"""Which epoch follows another: a pure function of what its members say when they are asked to freeze.

Whoever says COMMIT has heard a HOLD from everybody, so what a lost member may have applied, all others hold. Hence: if
anybody has applied a step, or all hold it, it is decided; else nobody has applied it, and it is open.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.islands.epoch import MOST_SHARDS, Card, Epoch
from shoal.values import fields, flag, items, whole


@dataclass(frozen=True)
class State:
    """What a member answers when it is asked to freeze."""

    applied: int
    held: int  # steps, if the one that it holds counts; equal to `applied` when it holds none
    have: list[int]  # shards of the open step
    behind: bool  # it is new, and still receives what was decided before it came

    @staticmethod
    def of(said: object) -> State:
        """BadValue for what is none."""
        s = fields(said, State.__dataclass_fields__)
        have = [whole(shard) for shard in items(s.get("have"), MOST_SHARDS)]
        return State(whole(s.get("applied")), whole(s.get("held")), have, flag(s.get("behind")))


def succeed(
    epoch: Epoch,
    states: dict[str, State],
    gone: dict[str, tuple[str, float]],
    ready: dict[str, Card],
    by: str,
    noticed: float,
) -> Epoch:
    """The epoch after this one."""
    whole = {key: state for key, state in states.items() if not state.behind}
    applied = max(state.applied for state in whole.values())
    base = applied + 1 if all(state.held == applied + 1 for state in whole.values()) else applied
    assert all(state.applied >= applied - 1 for state in whole.values()), f"more than a step apart: {states}"
    staying = [card for card in epoch.members if card.key in states and card.key not in gone]
    if not any(card.key in whole for card in staying):  # somebody has to save the state before it leaves
        staying = [next(card for card in epoch.members if card.key in whole), *staying]
    joined = [card for card in ready.values() if card.key not in epoch.keys]
    members = (*staying, *joined)
    keys = {card.key for card in members}
    have = {key: state.have for key, state in whole.items() if key in keys and state.applied == base and state.have}
    left = {card.key: gone.get(card.key, ("does not answer", 0.0))[0] for card in epoch.members if card.key not in keys}
    return Epoch(
        epoch.number + 1, members, base, have, left, tuple(card.key for card in joined), by, epoch.life, noticed
    )
