"""What the ranks of one island say to each other about the fleet: the first one speaks for all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.parallel import agree
from shoal.values import MOST_ITEMS, read_json

MOST_SHARED = 64 << 20  # bytes: an epoch of all islands is the longest that is said


@dataclass(frozen=True)
class Inner:
    rank: int
    world: int

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    def share(self, mine: Any) -> Any:
        """What the first rank says, on all of them."""
        if self.world == 1:
            return mine
        text = json.dumps(mine, allow_nan=False).encode() if self.speaks else b""
        length = agree.from_rank_0(len(text))
        data = torch.zeros(length, dtype=torch.uint8)
        if self.speaks:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        return read_json(bytes(data.tolist()), most_parts=MOST_ITEMS, most_bytes=MOST_SHARED)

    def all(self, mine: bool) -> bool:
        return agree.total(int(mine)) == self.world

    def texts(self, mine: str) -> list[str]:
        return agree.texts(mine)
