"""Lets a device's timeline see each block of a decoder (docs/decisions/057)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from shoal.model.decoder import BlockTimer, Decoder


class Timer(BlockTimer, Protocol):
    def gathered(self) -> None:
        """What the block under way has waited for is there."""
        ...


def time_blocks(decoders: Iterable[Decoder], timer: Timer) -> None:
    """FSDP gathers a block's weights in a hook before its forward pass, and the device waits there for the others: the
    block begins behind it. FSDP puts its hook first, so this one comes after it. Neither is compiled."""

    @torch.compiler.disable
    def gathered(module: Any, args: Any) -> None:
        timer.gathered()

    for decoder in decoders:
        decoder.timer = timer
        for block in decoder.blocks.values():
            if isinstance(block, FSDPModule):
                block.register_forward_pre_hook(gathered)
