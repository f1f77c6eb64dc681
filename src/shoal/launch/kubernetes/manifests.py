"""A request as what Kubernetes is sent: the job, and what it needs, which is owned by it and goes with it.

Pure: the same request gives the same documents in the same order.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from shoal.errors import UsageError
from shoal.launch.kubernetes import names, pod
from shoal.launch.kubernetes.indexed_job import indexed_job
from shoal.launch.kubernetes.jobset import jobset
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.request import PORT, Request
from shoal.observe.prometheus import PORT as METRICS_PORT

HIDDEN = "***"
MOST_BUNDLE_BYTES = 900_000  # of the 1 MiB that a ConfigMap may hold


def job(request: Request, as_jobset: bool) -> Manifest:
    return jobset(request) if as_jobset else indexed_job(request)


def belongings(request: Request, as_jobset: bool, secrets: Mapping[str, str] | None = None) -> list[Manifest]:
    """`secrets`: the values by the names of `pod.secret_keys`; without them they are hidden."""
    found = [config_map(request), _secret(request, secrets)]
    if not as_jobset:  # which makes its own
        found.append(_service(request))
    if request.launch.kubernetes.network_policy:
        found.append(_network_policy(request))
    return found


def owned_by(job: Manifest) -> list[Manifest]:
    """The `ownerReferences` of what the cluster removes with the job, which is given as the cluster has it."""
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"]}
    # Blocking: once the job is seen to be gone, so are they, and the name is free.
    return [{**owner, "uid": job["metadata"]["uid"], "blockOwnerDeletion": True}]


def config_map(request: Request, beside: Mapping[str, str] | None = None) -> Manifest:
    """The bundle, and further files `beside` it."""
    data = request.bundle.tar()
    if len(data) > MOST_BUNDLE_BYTES:
        raise UsageError(
            f"the code of the run is {len(data) / 1000:.0f} kB packed, and a Kubernetes ConfigMap carries "
            f"{MOST_BUNDLE_BYTES // 1000} kB; put it into the image, or name a smaller folder in launch.code."
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(request),
        "immutable": True,
        **({"data": dict(beside)} if beside else {}),
        "binaryData": {pod.TAR: base64.b64encode(data).decode()},
    }


def _secret(request: Request, secrets: Mapping[str, str] | None) -> Manifest:
    keys = [key for secret, key in pod.secret_keys(request).values() if secret == request.label]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.metadata(request),
        "type": "Opaque",
        "immutable": True,
        "stringData": {key: HIDDEN if secrets is None else secrets[key] for key in keys},
    }


def _service(request: Request) -> Manifest:
    """Headless: it only gives the pods names, and does so before they are ready, or the head would not be found."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(request),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB: request.label},
            "ports": [{"name": "head", "port": PORT}],
        },
    }


def _network_policy(request: Request) -> Manifest:
    """Nobody but the job's pods reaches them: NCCL and gloo listen on any port, and ask nobody for a password."""
    ours = {"matchLabels": {names.JOB: request.label}}
    ingress: list[Manifest] = [{"from": [{"podSelector": ours}]}]
    if request.launch.kubernetes.metrics:  # where Prometheus runs is not known here
        ingress.append({"ports": [{"protocol": "TCP", "port": METRICS_PORT}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(request),
        "spec": {
            "podSelector": ours,
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
