"""Who orthogonalises which matrix, where rows of matrices lie on several processes (FSDP2).

As many matrices at a time as there are processes: each process gets all rows of one of them, works on that one alone,
and gives every process its own rows of the result back. So each does its share of the work, nobody holds more than one
whole matrix, and a number travels twice instead of to everybody. The arithmetic is that of one process, bit for bit.
Copies (HSDP) each do so among themselves. Matrices that are cut in another way (tensor parallelism) are not shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Work = Callable[[Tensor], Tensor]


def shared_out(matrices: Iterable[Tensor], of: Work, work: Work) -> Iterator[tuple[Tensor, Tensor]]:
    """(matrix, `work` of `of` it) of those that can be shared out. `of` gives something that is laid out like the
    matrix, and is asked when it is its turn. Collective: the same matrices everywhere, in the same order."""
    by_group: dict[dist.ProcessGroup, list[DTensor]] = {}
    for matrix in matrices:
        assert isinstance(matrix, DTensor)
        by_group.setdefault(rows_over(matrix), []).append(matrix)  # type: ignore[arg-type]  # asked before
    for group, members in by_group.items():
        members.sort(key=lambda m: -m.numel())  # those of one round take about as long; the order is the same for all
        size = group.size()
        for at in range(0, len(members), size):
            batch = members[at : at + size]
            locals_ = [_local(of(m)) for m in batch]
            done = _round(locals_, [m.shape for m in batch], work, group)
            for matrix, rows in zip(batch, done, strict=True):
                yield matrix, _like(matrix, rows)


def rows_over(matrix: Tensor) -> dist.ProcessGroup | None:
    """The processes that share its rows; None where it is whole here, or cut otherwise."""
    if not isinstance(matrix, DTensor) or matrix.ndim != 2:
        return None
    cuts = [i for i, p in enumerate(matrix.placements) if not isinstance(p, Replicate)]
    cut = matrix.placements[cuts[0]] if len(cuts) == 1 else None
    if type(cut) is not Shard or cut.dim != 0:  # a strided one is another type
        return None
    return matrix.device_mesh.get_group(cuts[0])


def _round(mine: list[Tensor], shapes: list[torch.Size], work: Work, group: dist.ProcessGroup) -> list[Tensor]:
    """`mine`: this process's rows of each matrix, of which number i goes to process i."""
    me, size, like = group.rank(), group.size(), mine[0]
    sent = [m.numel() for m in mine] + [0] * (size - len(mine))
    own = me < len(mine)
    parts = [n * shapes[me][1] for n in rows_of(shapes[me][0], size)] if own else [0] * size
    whole = like.new_empty(sum(parts))
    dist.all_to_all_single(whole, torch.cat([m.reshape(-1) for m in mine]), parts, sent, group=group)
    result = work(whole.view(shapes[me])).contiguous().view(-1) if own else whole
    back = like.new_empty(sum(sent))
    dist.all_to_all_single(back, result, sent, parts, group=group)
    return [part.view(m.shape) for part, m in zip(back.split(sent[: len(mine)]), mine, strict=True)]


def rows_of(rows: int, size: int) -> list[int]:
    """That each process has of so many, as torch cuts them."""
    width = -(-rows // size)
    return [max(0, min(width, rows - i * width)) for i in range(size)]


def _local(matrix: Tensor) -> Tensor:
    assert isinstance(matrix, DTensor)
    return matrix.to_local()


def _like(matrix: DTensor, rows: Tensor) -> DTensor:
    return DTensor.from_local(
        rows, matrix.device_mesh, matrix.placements, run_check=False, shape=matrix.shape, stride=matrix.stride()
    )
