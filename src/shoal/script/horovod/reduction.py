"""Sums, averages and the like over all ranks, of many tensors at once: they travel together in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.script.horovod.refused import refuse
from shoal.script.horovod.world import size

BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class Reduction:
    name: str

    def __repr__(self) -> str:
        return self.name


Average, Sum, Min, Max, Product = (Reduction(name) for name in ("Average", "Sum", "Min", "Max", "Product"))
Adasum = Reduction("Adasum")
_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True)
class How:
    op: Reduction = Average
    before: float = 1.0  # factors
    after: float = 1.0

    @staticmethod
    def asked(op: Reduction | None, average: bool | None, before: float = 1.0, after: float = 1.0) -> How:
        """Of Horovod's arguments; `average` is what was there before `op`."""
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op is None:
            op = Sum if average is False else Average
        if op == Adasum:
            refuse("horovod.torch.Adasum")
        if op not in _OPS:
            raise ValueError(f"op={op!r} is none of hvd.Average, Sum, Min, Max and Product.")
        return How(op, float(before), float(after))


class Reducing:
    """A reduction under way."""

    def __init__(self, tensors: list[torch.Tensor], how: How) -> None:
        self._tensors, self._how = tensors, how
        self._under_way = [self._begun(bucket) for bucket in _buckets(tensors)]

    def _begun(self, bucket: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        flat = torch.cat([t.detach().reshape(-1) for t in bucket])
        _scale(flat, self._how.before)
        return flat, dist.all_reduce(flat, _OPS[self._how.op], async_op=True)

    def is_done(self) -> bool:
        return all(work.is_completed() for _, work in self._under_way)

    def result(self) -> list[torch.Tensor]:
        flats = list[torch.Tensor]()
        for flat, work in self._under_way:
            work.wait()
            if self._how.op == Average:
                flat.div_(size(), rounding_mode=None if flat.is_floating_point() else "trunc")
            _scale(flat, self._how.after)
            flats.append(flat)
        found = list[torch.Tensor]()
        for flat, bucket in zip(flats, _buckets(self._tensors), strict=True):
            parts = flat.split([t.numel() for t in bucket])
            found += [part.view(t.shape) for part, t in zip(parts, bucket, strict=True)]
        return found


def _scale(flat: torch.Tensor, factor: float) -> None:
    if factor != 1.0:
        flat.copy_(flat * factor)  # whole numbers are cut


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type on one device, of a size that is worth a message and not two copies of all."""
    bucket, held = list[torch.Tensor](), 0
    for t in tensors:
        new = t.numel() * t.element_size()
        if bucket and ((t.dtype, t.device) != (bucket[0].dtype, bucket[0].device) or held + new > BUCKET_BYTES):
            yield bucket
            bucket, held = [], 0
        bucket.append(t)
        held += new
    if bucket:
        yield bucket
