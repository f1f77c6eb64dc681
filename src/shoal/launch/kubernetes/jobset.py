"""The same job as a JobSet of one group of pods, for clusters that have the kind: other tools there look for it.

Pods are replaced one by one by the Job inside, as without JobSet: recreating all of them for each failure takes minutes
on a thousand nodes and has no backoff. The JobSet's own restarts are left for what ends that Job from outside.
"""

from __future__ import annotations

from shoal.launch.kubernetes import names, pod
from shoal.launch.kubernetes.indexed_job import job_spec, kueue
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.request import PORT, Request
from shoal.spec.duration import seconds

GROUP = "node"
JOB_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"  # of the JobSet, whose id outlives those of its Jobs


def jobset(request: Request) -> Manifest:
    head = f"{request.label}-{GROUP}-0-0.{request.label}:{PORT}"
    metadata = names.metadata(request)
    for key, more in kueue(request).items():
        metadata[key] |= more
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "subdomain": request.label, "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": GROUP, "jobIndex": 0, "podIndex": 0},
        "failurePolicy": {
            "maxRestarts": request.launch.requeues,
            "rules": [
                # 2 and 78: the Job's own rule has failed it.
                {"name": "wrong", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                # A node has been started again as often as it may.
                {
                    "name": "spent",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["MaxFailedIndexesExceeded", "FailedIndexes", "BackoffLimitExceeded"],
                },
            ],
        },
        "replicatedJobs": [
            {
                "name": GROUP,
                "replicas": 1,
                "template": {
                    "metadata": {"labels": names.labels(request), "annotations": names.notes(request)},
                    "spec": {**job_spec(request), "template": pod.template(request, head, JOB_UID_LABEL)},
                },
            }
        ],
        "ttlSecondsAfterFinished": round(seconds(request.launch.kubernetes.keep)),
    }
    if request.launch.kubernetes.kueue:
        spec["suspend"] = True
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}
