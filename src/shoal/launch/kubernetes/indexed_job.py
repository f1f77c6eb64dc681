"""An Indexed Job: one pod a node, with a number, replaced by itself when it is lost.

What an agent's exit code means (docs/reference/exit-codes.md) becomes the Job's rules; the first that fits a failed pod
counts. All agents leave with the head's code, so that every pod says the same.
"""

from __future__ import annotations

from typing import Any

from shoal.errors import TOLD_TO_STOP, WRONG_ENVIRONMENT, WRONG_USAGE
from shoal.launch.kubernetes import names, pod
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.request import PORT, Request
from shoal.spec.duration import seconds

JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"


def indexed_job(request: Request) -> Manifest:
    own = request.launch.kubernetes
    head = f"{request.label}-0.{request.label}:{PORT}"
    template = pod.template(request, head, JOB_UID_LABEL)
    template["spec"]["subdomain"] = request.label  # gives pods their names in the Service of that name
    spec: Manifest = {
        **job_spec(request),
        "ttlSecondsAfterFinished": round(seconds(own.keep)),
    }
    if own.kueue:
        spec["suspend"] = True  # Kueue starts it
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(request),
        "spec": {**spec, "template": template},
    }


def job_spec(request: Request) -> Manifest:
    """All but the pod."""
    nodes, batch = request.launch.nodes, request.run.batch is not None
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # Of each index: when all agents leave with 75 that is one restart of the run, not as many as it has nodes.
        "backoffLimitPerIndex": request.launch.requeues,
        # A node that has spent its share ends the job, since the others would wait for it; those of a batch do not.
        **({} if batch else {"maxFailedIndexes": 0}),
        "podReplacementPolicy": "Failed",  # a node's old agent has saved and left before the new one starts
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailIndex" if batch else "FailJob",
                    "onExitCodes": {
                        "containerName": names.CONTAINER,
                        "operator": "In",
                        "values": [WRONG_USAGE, WRONG_ENVIRONMENT],
                    },
                },
                # Evicted, preempted, drained, its node gone: replaced, and no failure of the run.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # Told to stop and saved: the time limit, a deleted pod, or a head that was told.
                {
                    "action": "Ignore",
                    "onExitCodes": {
                        "containerName": names.CONTAINER,
                        "operator": "In",
                        "values": [TOLD_TO_STOP],
                    },
                },
            ]
        },
    }
    if request.least_nodes < nodes:
        # A node that never came must not keep a finished run from ending.
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return spec


def kueue(request: Request) -> dict[str, dict[str, str]]:
    """Labels and annotations by which Kueue takes a job in; none where it was not asked for."""
    launch = request.launch
    if not launch.kubernetes.kueue:
        return {"labels": {}, "annotations": {}}
    labels = {"kueue.x-k8s.io/queue-name": str(launch.queue)}
    if launch.priority:
        labels["kueue.x-k8s.io/priority-class"] = launch.priority
    return {"labels": labels, "annotations": {}}


def _metadata(request: Request) -> Manifest:
    found: dict[str, Any] = names.metadata(request)
    for key, more in kueue(request).items():
        found[key] |= more
    if request.launch.kubernetes.kueue and request.least_nodes < request.launch.nodes:
        found["annotations"] |= {
            "kueue.x-k8s.io/job-min-parallelism": str(request.least_nodes),
            "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
        }
    return found
