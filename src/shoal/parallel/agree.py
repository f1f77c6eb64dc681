"""The few words that ranks exchange around a checkpoint: all went well or all fail alike, and who decides what.

Only small tensors of numbers travel (no pickle), over the default group; without a group there is one rank. A rank that
fails tells the others instead of leaving them to wait, so that a full disk on one node ends a save and nothing else.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

TEXT_BYTES = 2048  # of an error that travels; longer ones are cut
LINE_BYTES = 128


def here() -> tuple[int, int]:
    """(rank, world)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def first_error(mine: str | None) -> tuple[int, str] | None:
    """Everybody calls it; everybody learns the lowest rank that failed and its words, or that nobody failed."""
    rank, world = here()
    if world == 1:
        return None if mine is None else (0, mine)
    failed = torch.tensor([world if mine is None else rank], device=_device())
    dist.all_reduce(failed, op=dist.ReduceOp.MIN)
    culprit = int(failed.item())
    if culprit == world:
        return None
    words = torch.zeros(TEXT_BYTES, dtype=torch.uint8, device=_device())
    if rank == culprit:
        text = (mine or "").encode()[:TEXT_BYTES]
        words[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    dist.broadcast(words, src=culprit)
    return culprit, bytes(words.tolist()).rstrip(b"\0").decode(errors="ignore")


def from_rank_0(number: int) -> int:
    """Rank 0's number, on every rank."""
    return _exchange(number if here()[0] == 0 else 0)


def text_from_rank_0(text: str) -> str:
    """Rank 0's text, however long, on every rank."""
    return bytes_from_rank_0(text.encode()).decode()


def bytes_from_rank_0(data: bytes) -> bytes:
    """Rank 0's bytes, however many, on every rank."""
    rank, world = here()
    length = from_rank_0(len(data))
    if world == 1 or not length:
        return data if world == 1 else b""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if rank == 0 else torch.empty(length, dtype=torch.uint8)
    line = mine.to(_device())
    dist.broadcast(line, src=0)
    return data if rank == 0 else line.cpu().numpy().tobytes()


def total(number: int) -> int:
    """The sum over the ranks, on every rank."""
    return _exchange(number)


def anybody(mine: list[bool]) -> list[bool]:
    """For each place of a list that is equally long everywhere: whether it is true on any rank."""
    if here()[1] == 1 or not mine:
        return mine
    value = torch.tensor(mine, dtype=torch.uint8, device=_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return [bool(v) for v in value.tolist()]


def texts(mine: str) -> list[str]:
    """What each rank says, in the order of the ranks; at most `LINE_BYTES` each."""
    rank, world = here()
    if world == 1:
        return [mine]
    lines = torch.zeros(world, LINE_BYTES, dtype=torch.uint8, device=_device())
    data = mine.encode()
    if len(data) > LINE_BYTES:
        raise ValueError(f"'{mine}' is longer than {LINE_BYTES} bytes")
    if data:
        lines[rank, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.all_reduce(lines)  # each has written its own line
    return [bytes(line).rstrip(b"\0").decode() for line in lines.tolist()]


def _exchange(number: int) -> int:
    if here()[1] == 1:
        return number
    value = torch.tensor([number], dtype=torch.int64, device=_device())
    dist.all_reduce(value)
    return int(value.item())


def _device() -> torch.device:
    """Where the default group can exchange tensors: on the CPU, unless it speaks NCCL only."""
    backends = dist.get_backend_config(dist.group.WORLD)
    return torch.device("cpu") if "cpu:" in str(backends) else torch.device("cuda", torch.cuda.current_device())
