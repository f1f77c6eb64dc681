"""Which blocks of keys FlexAttention visits for packed documents: the lists against the whole mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from shoal.model import documents as flex
from shoal.model.attention import attention_mask

BLOCK = flex.BLOCK


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("seq", [640, 700])
def test_the_blocks_are_those_of_the_mask(seq: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(seq)
    numbers = (torch.rand(3, seq, generator=generator) < 1 / 150).cumsum(1).to(torch.int32)
    numbers[2] = 0  # a row that is one document
    seen = attention_mask(numbers, seq, window, torch.device("cpu"))
    assert seen is not None
    made = flex.mask(numbers, seq, window, torch.device("cpu"))
    assert isinstance(made, BlockMask)
    blocks = -(-seq // BLOCK)
    side = blocks * BLOCK
    whole = torch.zeros(3, side, side, dtype=torch.bool)
    whole[:, :seq, :seq] = seen[:, 0]
    tiles = whole.unflatten(2, (blocks, BLOCK)).unflatten(1, (blocks, BLOCK)).transpose(2, 3)
    some, every = tiles.any(-1).any(-1), tiles.all(-1).all(-1)
    partly, fully = (
        _visited(made.kv_num_blocks, made.kv_indices),
        _visited(made.full_kv_num_blocks, made.full_kv_indices),
    )
    assert not (some & ~(partly | fully)).any()  # nothing is missed
    assert not (fully & ~every)[:, : seq // BLOCK].any()  # a full block is not asked who sees whom
    assert (partly | fully).sum() <= 1.2 * some.sum()  # hardly anything is visited in vain
    assert not (partly & fully).any()


def _visited(counts: torch.Tensor | None, numbers: torch.Tensor | None) -> torch.Tensor:
    assert counts is not None
    assert numbers is not None
    ranks = torch.arange(numbers.shape[-1])
    listed = ranks < counts[:, 0, :, None]
    return torch.zeros_like(listed).scatter(-1, numbers[:, 0].long(), listed)
