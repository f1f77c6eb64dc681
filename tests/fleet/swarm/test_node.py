"""Whole peers, with a toy in place of the model: they train, come, go, are cut off, and stay one history."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shoal.fleet.swarm.ranges import count, union
from tests.fleet.swarm.toy_swarm import Swarm, swarm


def used_once(it: Swarm) -> int:
    """Samples that the history has used; each of them once."""
    chain = it.alive[0].node.chain
    ranges = [part.used for record in chain.past(chain.head.hash) for part in record.took]
    assert sum(map(count, ranges)) == count(union(*ranges)) == chain.head.ledger.done
    return chain.head.ledger.done


def test_peers_train_to_the_end_and_hold_the_same_weights(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 3, steps=60) as it:
            await it.until(lambda: all(p.task.done() for p in it.peers), 60)
            assert [p.task.result() for p in it.peers] == [0, 0, 0]
            nodes = [p.node for p in it.peers]
            heads = {n.chain.head.hash for n in nodes}
            assert len(heads) == 1
            assert len({n.work.digests[n.chain.head.hash] for n in nodes}) == 1
            chain = nodes[0].chain
            parts = [part for record in chain.past(chain.head.hash) for part in record.took]
            assert {part.peer for part in parts} == {p.me for p in it.peers}
            used = [part.used for part in parts]
            assert sum(map(count, used)) == count(union(*used)) > 480 - 3

    asyncio.run(story())
