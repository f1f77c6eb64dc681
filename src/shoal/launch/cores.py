"""How many cores a node's processes ask for where `launch.cpus` is empty: the GPUs' share of what the nodes have.

Whoever schedules knows what its nodes have. One core a process leaves the loader, the compiler, NCCL's threads and the
background save to share it with the process that feeds the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from shoal.launch.request import Request

SPARE = Fraction(7, 8)  # of a node's cores, where others (a cluster's own pods, a raylet) count theirs from the same


def is_open(request: Request) -> bool:
    """Whether it asks for GPUs and leaves the cores open."""
    return bool(request.launch.gpus) and not request.launch.cpus


def share(nodes: Iterable[tuple[float, int]], gpus: int, of_it: Fraction = Fraction(1)) -> int | None:
    """Of the cores of the least of the nodes that have so many GPUs, what goes with them. `nodes` are (cores, GPUs);
    None where none of them fits."""
    return min((int(cores * of_it) * gpus // has for cores, has in nodes if has >= gpus), default=None)


def asking(request: Request, cores: int | None) -> Request:
    """The request with so many cores named; as it is where that is no more than one a process."""
    if cores is None or cores <= request.processes:
        return request
    named = request.launch.model_copy(update={"cpus": cores})
    return replace(request, run=request.run.model_copy(update={"launch": named}))
