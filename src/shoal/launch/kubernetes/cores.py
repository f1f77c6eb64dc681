"""The cores of a pod by what the cluster's nodes have: asked of the cluster as the job is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shoal.errors import ShoalError
from shoal.launch.cores import SPARE, asking, is_open, share
from shoal.launch.kubernetes.client import Cluster, Refused
from shoal.launch.kubernetes.pod import node_selector
from shoal.launch.kubernetes.things import thing
from shoal.launch.request import Request


def with_cores(request: Request, cluster: Cluster) -> Request:
    """As it is where nobody may list nodes (an account of one namespace often may not): one core a process then, and no
    limit, so that a pod still uses what is idle."""
    if not is_open(request):
        return request
    wanted = node_selector(request)
    selector = ",".join(f"{name}={value}" for name, value in wanted.items())
    try:
        nodes = cluster.get(request.launch.kubernetes.namespace, ["nodes"], selector)
    except (Refused, ShoalError):
        return request
    return asking(request, share(of_nodes(nodes, request.gpu_resource), request.launch.gpus, SPARE))


def of_nodes(nodes: Sequence[Any], resource: str) -> Iterator[tuple[float, int]]:
    """(cores, GPUs) that pods may have, of nodes on which pods may be put."""
    for node in map(thing, nodes):
        has = node["status"].get("allocatable", {})
        cores, gpus = _cores(has.get("cpu", "")), has.get(resource, "")
        if cores and gpus.isdecimal() and len(gpus) < 6 and int(gpus) and not node["spec"].get("unschedulable"):
            yield cores, int(gpus)


def _cores(quantity: str) -> float:
    """`190`, or `189500m`."""
    number, scale = (quantity[:-1], 1000) if quantity.endswith("m") else (quantity, 1)
    return int(number) / scale if number.isdecimal() and len(number) < 12 else 0.0
