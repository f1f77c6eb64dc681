"""How many cores a node's task asks for where `launch.cpus` is empty: the GPUs' share of what the nodes have.

Slurm alone knows what its nodes have. One core a GPU, which it would give, leaves the loader, the compiler, NCCL's
threads and the background save to share it with the process that feeds the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from shoal.errors import ShoalError
from shoal.launch.request import Request
from shoal.launch.slurm.commands import Refused, ask

_NODE = re.compile(r"^(\d+)\+? (.*)$")
_GPUS = re.compile(r"\bgpu(?::([^:(,]+))?:(\d+)")


def with_cores(requests: Sequence[Request]) -> list[Request]:
    """Each with its cores named. Requests without GPUs, and those whose cores were named, stay as they are; so do all
    of them where Slurm cannot be asked: one core a process then."""
    queues = {r.launch.queue for r in requests if r.launch.gpus and not r.launch.cpus}
    nodes = {queue: _nodes(queue) for queue in queues}
    return [_with(request, nodes) for request in requests]


def _with(request: Request, nodes: dict[str | None, str]) -> Request:
    launch = request.launch
    if not launch.gpus or launch.cpus:
        return request
    cores = share(nodes[launch.queue], launch.gpus, launch.gpu_type)
    if cores is None or cores <= request.processes:
        return request
    named = launch.model_copy(update={"cpus": cores})
    return replace(request, run=request.run.model_copy(update={"launch": named}))


def share(nodes: str, gpus: int, kind: str | None) -> int | None:
    """Of the cores of the least of the nodes that have so many GPUs (of that kind), what goes with them. `nodes` are
    lines of `cores gres`, as sinfo prints them; None where none of them fits."""
    found = []
    for line in nodes.splitlines():
        if node := _NODE.match(line.strip()):
            has = [int(n) for name, n in _GPUS.findall(node[2]) if kind is None or name.lower() == kind.lower()]
            if sum(has) >= gpus:
                found.append(int(node[1]) * gpus // sum(has))
    return min(found, default=None)


def _nodes(queue: str | None) -> str:
    command = ["sinfo", "--noheader", "--exact", "--format=%c %G"]
    try:
        return ask([*command, f"--partition={queue}"] if queue else command)
    except (Refused, ShoalError):  # rendered elsewhere, or by a stand-in; sbatch will say what is wrong
        return ""
