"""A device's timeline sees each block from where its weights have been gathered: here the device is a list of marks."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal.model.decoder import Decoder
from shoal.parallel.timed import time_blocks
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from tests.ranks import run_ranks


class Marks:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.decoder: Decoder | None = None

    def enter(self) -> None:
        self.seen.append("enter")

    def gathered(self) -> None:
        assert self.decoder is not None
        whole = [b for b in self.decoder.blocks.values() if not any(isinstance(p, DTensor) for p in b.parameters())]
        self.seen.append(f"gathered {len(whole) > 0}")

    def leave(self) -> None:
        self.seen.append("leave")


def decoder() -> Decoder:
    found = Decoder(shape_of(Model(vocab_size=32, dim=16, layers=3, heads=2, ffn_dim=32)))
    found.init_weights(0)
    return found


def test_each_block_of_a_forward_pass_is_seen_and_a_backward_pass_is_not() -> None:
    marks, model = Marks(), decoder()
    time_blocks([model], marks)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert marks.seen == ["enter", "leave"] * 3


def _sharded(rank: int, world: int) -> list[str]:
    marks, model = Marks(), decoder()
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    time_blocks([model], marks)
    marks.decoder = model
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    return marks.seen


def test_a_sharded_block_begins_when_its_weights_have_been_gathered() -> None:
    for seen in run_ranks(_sharded, 2):
        assert seen == ["enter", "gathered True", "leave"] * 3
