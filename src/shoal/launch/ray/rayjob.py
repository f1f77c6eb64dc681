"""A request as a RayJob for KubeRay: a Ray cluster of its own that comes with the job and goes with it.

The head runs the driver and trains nothing; each worker is a node of the job. Secrets are named, never written.
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from shoal.errors import SpecError
from shoal.launch.kubernetes import names
from shoal.launch.kubernetes.checks import check as check_kubernetes
from shoal.launch.kubernetes.manifests import config_map
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.kubernetes.pod import PRODUCT_LABELS
from shoal.launch.ray.submission import STOP_MARGIN_S, TAR, script
from shoal.launch.request import Request

BUNDLE_AT = "/shoal/bundle"
DRIVER = "driver.sh"
CLUSTER_TTL_S = 60  # after the end, so that a person who is there can still read the head's logs
HEAD_NEEDS = {"cpu": "1", "memory": "4Gi"}  # Ray's control store, its dashboard and the driver


def text(request: Request) -> str:
    documents = [_config_map(request), rayjob(request)]
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)


def rayjob(request: Request) -> Manifest:
    check(request)
    launch, own = request.launch, request.launch.kubernetes
    wait_s = math.ceil(request.warning_s) + STOP_MARGIN_S
    metadata = names.metadata(request)
    if own.kueue:
        metadata["labels"] |= {"kueue.x-k8s.io/queue-name": launch.queue}
        metadata["labels"] |= {"kueue.x-k8s.io/priority-class": launch.priority} if launch.priority else {}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            # In a file: on its way through the operator and `ray job submit` a command is quoted anew.
            "entrypoint": f"exec bash {BUNDLE_AT}/{DRIVER}",
            "runtimeEnvYAML": yaml.safe_dump({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}}),
            # Its pod prints the log of the driver, and keeps it when the cluster is gone.
            "submissionMode": "K8sJobMode",
            # The driver starts agents again and knows which exit codes deserve it; a new cluster would not.
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": CLUSTER_TTL_S,
            **({"suspend": True} if own.kueue else {}),  # until Kueue has room
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": _pod(request, _container(request, "ray-head", HEAD_NEEDS, HEAD_NEEDS, []), []),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "nodes",
                        "replicas": launch.nodes,
                        "minReplicas": request.least_nodes,
                        "maxReplicas": launch.nodes,
                        "rayStartParams": {"num-cpus": str(request.cpus)},
                        "template": _worker(request),
                    }
                ],
            },
        },
    }


def check(request: Request) -> None:
    check_kubernetes(request)
    for name, reference in request.launch.secrets.items():
        if reference.startswith("env:"):
            raise SpecError(
                f"launch.secrets.{name} is {reference}, and a manifest holds no secrets; put it into the cluster "
                "(`kubectl create secret generic …`) and name it as `kubernetes:SECRET/KEY`."
            )


def _config_map(request: Request) -> Manifest:
    job = f"{request.launch.kubernetes.namespace}/{request.label}"
    return config_map(request, {DRIVER: script(request, f"{BUNDLE_AT}/{TAR}", job) + "\n"})


def _worker(request: Request) -> Manifest:
    launch, own = request.launch, request.launch.kubernetes
    requests, limits = {"cpu": str(request.cpus)}, {}
    if launch.memory_gb is not None:
        requests["memory"] = limits["memory"] = f"{round(launch.memory_gb * 1024)}Mi"
    devices = {request.gpu_resource: launch.gpus} if launch.gpus else {}
    for resource, count in {**devices, **own.rdma}.items():
        requests[resource] = limits[resource] = str(count)
    mounts: list[tuple[Manifest, Manifest]] = [
        (
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{round(own.shm_gb * 1024)}Mi"}},
            {"name": "shm", "mountPath": "/dev/shm"},
        )
    ]
    for i, volume in enumerate(launch.volumes):
        source: Manifest = {"hostPath": {"path": volume.host}}
        if volume.claim is not None:
            source = {"persistentVolumeClaim": {"claimName": volume.claim}}
        mount: Manifest = {"name": f"volume-{i}", "mountPath": volume.at}
        mounts.append(({"name": f"volume-{i}", **source}, mount | ({"readOnly": True} if volume.read_only else {})))
    container = _container(request, "ray-worker", requests, limits, [mount for _, mount in mounts])
    pod = _pod(request, container, [volume for volume, _ in mounts])
    spec = pod["spec"]
    spec["terminationGracePeriodSeconds"] = round(request.warning_s)
    selector = dict(own.node_selector)
    if launch.gpus and launch.gpu_type:
        selector.setdefault(PRODUCT_LABELS[request.gpu_resource.split("/")[0]], launch.gpu_type.replace(" ", "-"))
    if selector:
        spec["nodeSelector"] = selector
    keys = dict.fromkeys([*([request.gpu_resource] if launch.gpus else []), *own.tolerations])
    if keys:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in keys]
    if launch.priority and not own.kueue:
        spec["priorityClassName"] = launch.priority
    if own.kueue and own.topology:
        pod["metadata"]["annotations"] = {"kueue.x-k8s.io/podset-required-topology": own.topology}
    return pod


def _pod(request: Request, container: Manifest, volumes: list[Manifest]) -> Manifest:
    own = request.launch.kubernetes
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": own.user,
            "runAsGroup": own.user,
            "fsGroup": own.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "bundle", "configMap": {"name": request.label}}, *volumes],
    }
    if own.service_account:
        spec["serviceAccountName"] = own.service_account
    if own.pull_secret:
        spec["imagePullSecrets"] = [{"name": own.pull_secret}]
    return {"metadata": {"labels": names.labels(request)}, "spec": spec}


def _container(
    request: Request, name: str, requests: dict[str, str], limits: dict[str, str], mounts: list[Manifest]
) -> Manifest:
    launch = request.launch
    values = {"HOME": "/tmp", "USER": "shoal", "RAY_USAGE_STATS_ENABLED": "0", **launch.env}
    env: list[Manifest] = [{"name": k, "value": v.replace("$(", "$$(")} for k, v in values.items()]
    for variable, reference in launch.secrets.items():
        kind, _, what = reference.partition(":")
        if kind == "kubernetes":
            secret, _, key = what.partition("/")
            env.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    capabilities: dict[str, Any] = {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if launch.kubernetes.rdma else {})}
    return {
        "name": name,
        "image": launch.image,
        "env": env,
        "resources": {"requests": requests, "limits": limits} if limits else {"requests": requests},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": [{"name": "bundle", "mountPath": BUNDLE_AT, "readOnly": True}, *mounts],
    }


class _Plain(yaml.SafeDumper):
    """As a person would write it: no references, programs as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _block)
