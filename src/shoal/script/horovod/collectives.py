"""Horovod's collectives on tensors. Those with a `_` change what they are given; those with `async` give a handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.script.horovod.agreement import Call, agree, announce, me
from shoal.script.horovod.compression import Compression, Compressor
from shoal.script.horovod.reduction import How, Reducing, Reduction, Sum
from shoal.script.horovod.world import rank, size


class Handle:
    """Of something under way: for `poll` and `synchronize`."""

    def __init__(self, is_done: Callable[[], bool], result: Callable[[], Any]) -> None:
        self._is_done, self._result = is_done, result
        self._known: list[Any] = []

    def poll(self) -> bool:
        return bool(self._known) or self._is_done()

    def wait(self) -> Any:
        if not self._known:
            self._known.append(self._result())
        return self._known[0]


def poll(handle: Handle) -> bool:
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    return handle.wait()


def reducing(tensors: list[torch.Tensor], how: How) -> Reducing:
    announce(Call.of("allreduce", tensors, how.op.name))
    return Reducing(tensors, how)


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: How, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(t.clone() for t in reducing(list(tensors), how).result())  # no views: a script may change them

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *reducing(list(grads), ctx.how).result())


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    how = How.asked(op, average, prescale_factor, postscale_factor)
    packed = [compression.compress(t) for t in tensors]
    reduced = _Reduced.apply(how, *[t for t, _ in packed])
    return [compression.decompress(t, about) for t, (_, about) in zip(reduced, packed, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    under_way = reducing(list(tensors), How.asked(op, average, prescale_factor, postscale_factor))
    return Handle(under_way.is_done, under_way.result)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    given = list(tensors)
    under_way = reducing(given, How.asked(op, average, prescale_factor, postscale_factor))

    def result() -> list[torch.Tensor]:
        for t, value in zip(given, under_way.result(), strict=True):
            t.detach().copy_(value)
        return given

    return Handle(under_way.is_done, result)


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    reduced: list[torch.Tensor] = grouped_allreduce_async_(tensors, *args, **kwargs).wait()
    return reduced


def allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return grouped_allreduce([tensor], *args, **kwargs)[0]


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return grouped_allreduce_([tensor], *args, **kwargs)[0]


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    return _first(grouped_allreduce_async([tensor], *args, **kwargs))


def allreduce_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    return _first(grouped_allreduce_async_([tensor], *args, **kwargs))


def _first(handle: Handle) -> Handle:
    return Handle(handle.poll, lambda: handle.wait()[0])


def broadcast_all_async_(tensors: list[torch.Tensor], root_rank: int) -> Handle:
    announce(Call.of("broadcast", tensors, f"from rank {root_rank}"))
    lines = [t.detach().contiguous() for t in tensors]
    works = [dist.broadcast(line, root_rank, async_op=True) for line in lines]

    def result() -> list[torch.Tensor]:
        for t, line, work in zip(tensors, lines, works, strict=True):
            work.wait()
            if line.data_ptr() != t.data_ptr():
                t.detach().copy_(line)
        return tensors

    return Handle(lambda: all(work.is_completed() for work in works), result)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    return _first(broadcast_all_async_([tensor], root_rank))


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    sent: torch.Tensor = broadcast_async_(tensor, root_rank).wait()
    return sent


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    return broadcast_async_(tensor.detach().clone(), root_rank)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
        ctx.root_rank = root_rank
        sent: torch.Tensor = broadcast_async(tensor, root_rank).wait()
        return sent

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (reduced,) = reducing([grad], How()).result()
        return (reduced if rank() == ctx.root_rank else torch.zeros_like(reduced)), None


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    sent: torch.Tensor = _Broadcast.apply(tensor, root_rank)
    return sent


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    if not tensor.dim():
        raise ValueError("hvd.allgather puts tensors together along their first dimension, and a number has none.")
    lengths = announce(Call.of("allgather", [tensor], but_first=True), len(tensor))
    longest = tensor.new_zeros((max(lengths), *tensor.shape[1:]))  # all are sent at one length
    longest[: len(tensor)] = tensor.detach()
    there = [torch.empty_like(longest) for _ in lengths]
    work = dist.all_gather(there, longest, async_op=True)

    def result() -> torch.Tensor:
        work.wait()
        return torch.cat([t[:length] for t, length in zip(there, lengths, strict=True)])

    return Handle(work.is_completed, result)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.length = len(tensor)
        gathered: torch.Tensor = allgather_async(tensor).wait()
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (reduced,) = reducing([grad], How()).result()  # the average, as Horovod has it
        return reduced.narrow(0, me(announce(Call("lengths"), ctx.length)), ctx.length)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    gathered: torch.Tensor = _Gathered.apply(tensor) if tensor.dim() else allgather_async(tensor).wait()
    return gathered


def barrier() -> None:
    announce(Call("barrier"))


def join(device: int = -1) -> int:
    """This rank has no more data. It gives zeros to what the others still reduce, until they have none either; the rank
    that joined last. Averages are over all ranks, as Horovod has it."""
    before, last = [False] * size(), -1
    while True:
        agreed = agree(None)
        last = max([r for r, has in enumerate(agreed.joined) if has and not before[r]], default=last)
        before = agreed.joined
        if agreed.call is None:
            return last
        zeros = [torch.zeros(shape, dtype=dtype, device=kind) for shape, dtype, kind in agreed.call.tensors]
        Reducing(zeros, How(Sum)).result()
