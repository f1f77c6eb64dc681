"""Ranks tell each other what they are about to do before they do it.

Horovod matches what ranks ask for by name; torch.distributed matches by order, and where the orders differ it hangs or
mixes up values. So each call is announced first, on the CPU: a digest of it, and whether the rank has joined. Where
all say the same it goes on. Else the whole words are exchanged: a difference ends every rank with both in one sentence,
and ranks that have joined learn what to take part in. It takes one small message for each call, not for each tensor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.script.horovod.world import here, rank, size

WITH_JOINED = ("Average", "Sum")  # reductions that zeros do not disturb


@dataclass(frozen=True)
class Call:
    kind: str
    how: str = ""
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, str], ...] = ()  # shape, type, kind of device

    @staticmethod
    def of(kind: str, tensors: list[torch.Tensor], how: str = "", but_first: bool = False) -> Call:
        """`but_first`: the first dimension may be another on each rank."""
        about = [(tuple(t.shape[1:] if but_first else t.shape), t.dtype, t.device.type) for t in tensors]
        return Call(kind, how, tuple(about))

    def __str__(self) -> str:
        shown = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype, _ in self.tensors[:3]]
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return " ".join(word for word in (self.kind, self.how, ", ".join(shown) + more) if word)

    @property
    def digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=7).digest())


@dataclass(frozen=True)
class Agreed:
    numbers: list[int]  # one that each rank has given
    joined: list[bool]
    call: Call | None  # what the ranks do that have not joined; None: all have


def agree(call: Call | None, number: int = 0) -> Agreed:
    """`None`: this rank has joined."""
    mine = torch.tensor([call is None, 0 if call is None else call.digest, number], dtype=torch.int64)
    told = [torch.empty_like(mine) for _ in range(size())]
    dist.all_gather(told, mine, group=here().said)
    said = [[int(n) for n in one.tolist()] for one in told]
    joined = [bool(has) for has, _, _ in said]
    if all(joined) or (not any(joined) and len({digest for _, digest, _ in said}) == 1):
        return Agreed([number for _, _, number in said], joined, call)
    calls: list[Call | None] = [None] * size()
    dist.all_gather_object(calls, call, group=here().said)
    active = {r: one for r, one in enumerate(calls) if one is not None}
    first, one = next(iter(active.items()))
    for r, other in active.items():
        if other != one:
            raise RuntimeError(
                f"rank {first} calls {one} and rank {r} calls {other}; under Shoal's stand-in for Horovod all ranks "
                "call the same things in the same order."
            )
    if one.kind != "allreduce" or one.how not in WITH_JOINED:
        raise RuntimeError(
            f"rank {joined.index(True)} has joined and has only zeros to give, so {one} is not possible."
        )
    return Agreed([number for _, _, number in said], joined, one)


def announce(call: Call, number: int = 0) -> list[int]:
    """By a rank that has not joined; the numbers of all ranks."""
    return agree(call, number).numbers if size() > 1 else [number]


def me(numbers: list[int]) -> int:
    """Where this rank's part begins, of parts so long."""
    return sum(numbers[: rank()])
