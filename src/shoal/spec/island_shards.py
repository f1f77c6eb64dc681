"""Who computes which shards of a step: pure functions of the members, so that nobody has to be asked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def blocks(shards: int, members: int) -> list[range]:
    """All shards in contiguous blocks, one a member, as equal as they can be."""
    cuts = [shards * i // members for i in range(members + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def deal(shards: int, have: Mapping[str, Sequence[int]], members: Sequence[str]) -> dict[str, list[int]]:
    """Every shard to one member: each keeps those that it has, and what nobody has goes to those with the fewest.

    Where nobody has any, these are the blocks. Of a shard that two members say to have, the first one keeps it.
    """
    if not any(have.get(member) for member in members):
        return {member: list(block) for member, block in zip(members, blocks(shards, len(members)), strict=True)}
    dealt: dict[str, list[int]] = {}
    taken: set[int] = set()
    for member in members:
        dealt[member] = [shard for shard in have.get(member, ()) if shard not in taken]
        taken.update(dealt[member])
    for shard in range(shards):
        if shard not in taken:
            fewest = min(members, key=lambda member: len(dealt[member]))
            dealt[fewest].append(shard)
    return dealt
