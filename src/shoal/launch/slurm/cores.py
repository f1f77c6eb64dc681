"""The cores of a node's task by what the partition's nodes have: asked of Slurm, which alone knows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.errors import ShoalError
from shoal.launch import cores
from shoal.launch.request import Request
from shoal.launch.slurm.commands import Refused, ask

_NODE = re.compile(r"^(\d{1,9})\+? (.*)$")
_GPUS = re.compile(r"\bgpu(?::([^:(,]+))?:(\d{1,9})")


def with_cores(requests: Sequence[Request]) -> list[Request]:
    """Each with its cores named. Requests without GPUs, and those whose cores were named, stay as they are; so do all
    of them where Slurm cannot be asked: one core a process then."""
    queues = {r.launch.queue for r in requests if cores.is_open(r)}
    nodes = {queue: _nodes(queue) for queue in queues}
    return [_with(request, nodes) for request in requests]


def _with(request: Request, nodes: dict[str | None, str]) -> Request:
    launch = request.launch
    if not cores.is_open(request):
        return request
    return cores.asking(request, share(nodes[launch.queue], launch.gpus, launch.gpu_type))


def share(nodes: str, gpus: int, kind: str | None) -> int | None:
    """Of the cores of the least of the nodes that have so many GPUs (of that kind), what goes with them. `nodes` are
    lines of `cores gres`, as sinfo prints them; None where none of them fits."""
    found = []
    for line in nodes.splitlines():
        if node := _NODE.match(line.strip()):
            has = [int(n) for name, n in _GPUS.findall(node[2]) if kind is None or name.lower() == kind.lower()]
            found.append((float(node[1]), sum(has)))
    return cores.share(found, gpus)


def _nodes(queue: str | None) -> str:
    command = ["sinfo", "--noheader", "--exact", "--format=%c %G"]
    try:
        return ask([*command, f"--partition={queue}"] if queue else command)
    except (Refused, ShoalError):  # rendered elsewhere, or by a stand-in; sbatch will say what is wrong
        return ""
