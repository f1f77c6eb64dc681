"""Where the nodes of a job may stand: Ray's placement groups.

One group of `min_nodes` bundles, which Ray gives all at once or not at all and on as many machines, so that two jobs
never hold half of what each needs; and one group for each further node, which joins when it gets its place. A bundle
whose machine is lost is given another one by Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from shoal.launch.cores import SPARE, asking, is_open, share
from shoal.launch.ray.checks import KUBERAY
from shoal.launch.request import Request
from shoal.values import BadValue, field, real

GANG = "shoal {job}"  # the names of the groups, by which `states` finds those that wait
FURTHER = "shoal {job} node {node}"
A_LITTLE = 0.001  # of Ray's resource `accelerator_type:X`, which marks a machine and is not used up


def bundle(request: Request) -> dict[str, float]:
    """What one node needs, in Ray's words."""
    launch = request.launch
    needs: dict[str, float] = {"CPU": request.cpus}
    if launch.gpus:
        needs["GPU"] = launch.gpus
        if launch.gpu_type and launch.ray.address != KUBERAY:  # there it is a label of the machines, not Ray's word
            needs[f"accelerator_type:{launch.gpu_type}"] = A_LITTLE
    if launch.memory_gb is not None:
        needs["memory"] = round(launch.memory_gb * 2**30)
    return {**needs, **launch.ray.resources}


def with_cores(request: Request) -> Request:
    """By what the cluster's machines have, asked of Ray inside it."""
    if not is_open(request):
        return request
    import ray

    kind = None if request.launch.ray.address == KUBERAY else request.launch.gpu_type
    return asking(request, share(of_machines(ray.nodes(), kind), request.launch.gpus, SPARE))


def of_machines(nodes: Iterable[Mapping[str, Any]], kind: str | None) -> Iterator[tuple[float, int]]:
    """(CPU, GPU) of those that are alive and have GPUs of that kind."""
    for node in nodes:
        has = node.get("Resources") or {}
        if node.get("Alive") and has.get("GPU") and (kind is None or f"accelerator_type:{kind}" in has):
            with suppress(BadValue):  # what is counted otherwise does not count
                yield field(has, "CPU", real, 0.0), int(field(has, "GPU", real))


def words(needs: dict[str, float]) -> str:
    """`4 CPU, 8 GPU and 64 GB memory`."""
    said = []
    for name, amount in needs.items():
        if name == "memory":
            said.append(f"{amount / 2**30:g} GB memory")
        elif name.startswith("accelerator_type:"):
            said.append(name.partition(":")[2])
        else:
            said.append(f"{amount:g} {name}")
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"


class Places:
    """Asked for when made; held until `free`."""

    def __init__(self, request: Request, job: str) -> None:
        from ray.util import placement_group

        needs, least = bundle(request), request.least_nodes
        self._gang = placement_group([needs] * least, strategy="STRICT_SPREAD", name=GANG.format(job=job))
        self._further = {
            node: placement_group([needs], strategy="PACK", name=FURTHER.format(job=job, node=node))
            for node in range(least, request.launch.nodes)
        }
        self._needs, self._least = needs, least

    def actor_options(self, node: int) -> dict[str, Any]:
        """For an actor that takes the whole bundle of that node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index = (self._gang, node) if node < self._least else (self._further[node], 0)
        others = {k: v for k, v in self._needs.items() if k not in ("CPU", "GPU", "memory")}
        return {
            "num_cpus": self._needs["CPU"],
            "num_gpus": self._needs.get("GPU", 0),
            "memory": self._needs.get("memory"),
            "resources": others,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }

    def free(self) -> None:
        from ray.util import remove_placement_group

        for group in (self._gang, *self._further.values()):
            remove_placement_group(group)
