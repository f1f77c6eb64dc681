"""What our things are called in a cluster, so that they find each other and we find them again."""

from __future__ import annotations

from typing import Any

from shoal.launch.request import Request

# One object, as YAML or JSON would have it: nothing here knows a client's classes.
Manifest = dict[str, Any]

MANAGED = "app.kubernetes.io/managed-by"
JOB = "shoal/job"  # label: the job's name; on everything that belongs to it
RUN = "shoal/run"  # annotation: the run's name, which may hold what a label must not
BUNDLE = "shoal/bundle"  # annotation: the SHA-256 of the code
STOPPED = "shoal/stopped"  # annotation: when a person told it to stop
CONTAINER = "agent"
SUSPENDED_BY_KUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "batch.kubernetes.io/job-completion-index"


def labels(request: Request) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "shoal",
        "app.kubernetes.io/instance": request.label,
        "app.kubernetes.io/component": "training",
        MANAGED: "shoal",
        JOB: request.label,
    }


def notes(request: Request) -> dict[str, str]:
    """Annotations."""
    return {RUN: request.name, BUNDLE: request.bundle.sha256}


def metadata(request: Request, **more: Any) -> Manifest:
    return {
        "name": request.label,
        "namespace": request.launch.kubernetes.namespace,
        "labels": labels(request),
        "annotations": notes(request),
        **more,
    }
