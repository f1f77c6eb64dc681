"""The sum over shards is the same bits whoever adds it up, and shards always go to somebody."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from shoal.spec.island_shards import blocks, deal
from shoal.spec.island_sums import Forest, cover, halves, path


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8, 12, 16, 17])
def test_every_split_over_islands_gives_the_same_bits(shards: int) -> None:
    rng = random.Random(shards)
    leaves = [torch.randn(50, generator=torch.Generator().manual_seed(k)) * 10.0 ** (k % 7) for k in range(shards)]

    def total(owners: list[int], islands: int) -> Tensor:
        """Each island adds what it has; somebody adds what they send, in any order."""
        sent = []
        for island in range(islands):
            forest: Forest[Tensor] = Forest(shards, lambda a, b: a.add_(b))
            mine = [k for k in range(shards) if owners[k] == island]
            rng.shuffle(mine)
            for k in mine:
                forest.plant((k, k + 1), leaves[k].clone())
            assert sorted(forest.sums) == cover(mine, shards)
            sent += list(forest.sums.items())
        rng.shuffle(sent)
        whole: Forest[Tensor] = Forest(shards, lambda a, b: a.add_(b))
        for node, value in sent:
            whole.plant(node, value)
        root = whole.root()
        assert root is not None
        return root

    alone = total([0] * shards, 1)
    for islands in (1, 2, 3, 4):
        for _ in range(10):
            assert torch.equal(total([rng.randrange(islands) for _ in range(shards)], islands), alone)
    if shards > 2:  # another order would show: the test can fail
        assert not torch.equal(sum(leaves[1:], leaves[0].clone()), alone) or shards < 5


def test_the_tree_has_each_shard_once() -> None:
    for shards in range(2, 40):
        left, right = halves((0, shards))
        assert left[1] == right[0]
        assert (left[0], right[1]) == (0, shards)
        assert path(shards - 1, shards)[0] == (0, shards)
        assert path(shards - 1, shards)[-1] == (shards - 1, shards)
        assert cover(range(shards), shards) == [(0, shards)]


def test_shards_are_dealt_once_and_kept_by_those_who_have_them() -> None:
    rng = random.Random(7)
    for _ in range(300):
        shards, members = rng.randint(1, 20), [f"m{i}" for i in range(rng.randint(1, 6))]
        have: dict[str, list[int]] = {}
        for k in range(shards):
            if rng.random() < 0.6:
                have.setdefault(rng.choice([*members, "dead"]), []).append(k)
        dealt = deal(shards, have, members)
        assert sorted(k for mine in dealt.values() for k in mine) == list(range(shards))
        for member in members:
            assert set(have.get(member, ())) <= set(dealt[member])


def test_blocks_are_as_equal_as_can_be() -> None:
    for shards in range(1, 30):
        for members in range(1, 9):
            sizes = [len(b) for b in blocks(shards, members)]
            assert sum(sizes) == shards
            assert max(sizes) - min(sizes) <= 1
