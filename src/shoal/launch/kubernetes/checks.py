"""What is wrong with a request before a cluster hears of it."""

from __future__ import annotations

import re

from shoal.errors import SpecError
from shoal.launch.kubernetes.pod import PRODUCT_LABELS, in_a_volume
from shoal.launch.request import Request

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def check(request: Request) -> None:
    launch, own = request.launch, request.launch.kubernetes
    if not launch.image:
        raise SpecError(
            "launch.image is empty, and Kubernetes runs nothing without one; name an image that holds Shoal."
        )
    if own.kueue and not launch.queue:
        raise SpecError("launch.kubernetes.kueue is on and launch.queue is empty; name the LocalQueue.")
    if launch.queue and not own.kueue:
        raise SpecError(
            f"launch.queue is {launch.queue}, and Kubernetes alone has no queues; set launch.kubernetes.kueue to true "
            "where the cluster has Kueue, or leave the queue out."
        )
    if own.topology and not own.kueue:
        raise SpecError(
            "launch.kubernetes.topology is kept by Kueue; set launch.kubernetes.kueue, or leave the topology out."
        )
    if launch.gpus and launch.gpu_type:
        _check_type(launch.gpu_type, request.gpu_resource)
    if request.time_limit_s is not None and request.time_limit_s <= request.warning_s:
        raise SpecError(
            f"launch.time_limit {launch.time_limit} leaves no time to train: {request.warning_s:g} s of it are for "
            "saving (guard.grace_s and 30 s more); make it longer."
        )
    if request.run.batch is not None:
        if own.jobset is True:
            raise SpecError(
                "launch.kubernetes.jobset is for pods that must be there together, and those of a batch need not; "
                "leave it out."
            )
        if not in_a_volume(request, request.there):
            raise SpecError(
                f"the workspace {request.there} is in none of launch.volumes, and the pods of a batch agree there on "
                "who does what; set launch.workspace to a folder of a volume that all pods share."
            )
    elif not in_a_volume(request, request.there) and request.run.remote_checkpoints is None:
        raise SpecError(
            f"the workspace {request.there} is in none of launch.volumes, so that checkpoints would go with their pod; "
            "set launch.workspace to a folder of a volume that all pods share, or keep copies (checkpoint.remote)."
        )


def _check_type(gpu_type: str, resource: str) -> None:
    if resource.split("/")[0] not in PRODUCT_LABELS:
        raise SpecError(
            f"launch.gpu_type is {gpu_type}, and which label tells that of {resource} is not known; leave it out and "
            "use launch.kubernetes.node_selector."
        )
    if not _LABEL_VALUE.fullmatch(gpu_type.replace(" ", "-")):
        raise SpecError(
            f"launch.gpu_type '{gpu_type}' cannot be the value of a node's label; write it as "
            "`kubectl get nodes -L nvidia.com/gpu.product` shows it."
        )
