"""What Shoal's manifests rest on, said by a real control plane: the rules of Jobs, and that the test nodes run pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.clusters.api import Object, condition
from tests.clusters.kubernetes import IMAGE, Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.uses("kubernetes")]
DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
WRONG = {"action": "FailJob", "onExitCodes": {"containerName": "main", "operator": "In", "values": [2, 78]}}


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Cluster]:
    with cluster("one", "two") as made:
        yield made


@pytest.fixture
def team(kubernetes: Cluster) -> Iterator[str]:
    with kubernetes.namespace() as name:
        yield name


def a_job(name: str, script: str, nodes: int = 1, pod: Object | None = None, **container: Any) -> Object:
    """As many pods as nodes, each on its own."""
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"job-name": name}}}
    pod = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": 10,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "containers": [{"name": "main", "image": IMAGE, "command": ["bash", "-c", script], **container}],
        **(pod or {}),
    }
    spec = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [DISRUPTED, WRONG]},
        "template": {"spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def submit(kubernetes: Cluster, team: str, job: Object) -> str:
    kubernetes.api.create(f"/apis/batch/v1/namespaces/{team}/jobs", job)
    return f"/apis/batch/v1/namespaces/{team}/jobs/{job['metadata']['name']}"


def ended(job: Object) -> bool:
    return bool(condition(job, "Complete") or condition(job, "Failed"))


def pods(kubernetes: Cluster, team: str) -> list[Object]:
    return kubernetes.api.items(f"/api/v1/namespaces/{team}/pods")


def test_two_pods_find_each_other_by_name_and_end_well(kubernetes: Cluster, team: str) -> None:
    service = {"clusterIP": "None", "selector": {"job-name": "pair"}, "publishNotReadyAddresses": True}
    kubernetes.api.create(f"/api/v1/namespaces/{team}/services", {"metadata": {"name": "pair"}, "spec": service})
    other = "pair-$((1 - JOB_COMPLETION_INDEX)).pair"
    script = f"until getent hosts {other}; do sleep 0.1; done; hostname; sleep 1"
    job = kubernetes.api.until(submit(kubernetes, team, a_job("pair", script, nodes=2)), ended)
    assert condition(job, "Complete"), job["status"]
    ran = pods(kubernetes, team)
    assert {pod["spec"]["nodeName"] for pod in ran} == {"one", "two"}
    for pod in ran:
        said = kubernetes.kubectl("logs", "-n", team, pod["metadata"]["name"]).split()
        index = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
        assert said[-1] == f"pair-{index}"
        assert said[1] == f"pair-{1 - int(index)}.pair.{team}.svc.cluster.local"


def test_exit_code_2_fails_the_job_at_once(kubernetes: Cluster, team: str) -> None:
    job = a_job("wrong", "exit 2")
    job["spec"]["backoffLimit"] = 5
    failed = condition(kubernetes.api.until(submit(kubernetes, team, job), ended), "Failed")
    assert failed is not None
    assert failed["reason"] == "PodFailurePolicy"
    assert "failed with exit code 2 matching FailJob rule at index 1" in failed["message"]
    assert len(pods(kubernetes, team)) == 1


def test_a_drained_node_costs_no_retry(kubernetes: Cluster, team: str) -> None:
    """The pod hears SIGTERM; the control plane marks it as disrupted, so a rule replaces it, whatever backoffLimit."""
    script = "trap 'touch /shared/saved; exit 143' TERM; while [ ! -e /shared/go ]; do sleep 0.1; done"
    shared = kubernetes.folder / f"{team}-shared"
    shared.mkdir()
    volumes = {"volumes": [{"name": "shared", "hostPath": {"path": str(shared)}}]}
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    path = submit(kubernetes, team, a_job("drained", script, pod=volumes, volumeMounts=mounts))
    kubernetes.api.until(path, lambda job: job["status"].get("ready") == 1)
    (first,) = pods(kubernetes, team)
    node = first["spec"]["nodeName"]
    try:
        kubernetes.kubectl("drain", node, "--force", "--timeout=60s")
        for _, second in kubernetes.api.watch(f"/api/v1/namespaces/{team}/pods"):
            if second["metadata"]["uid"] != first["metadata"]["uid"] and second["status"]["phase"] == "Running":
                break
    finally:
        kubernetes.kubectl("uncordon", node)
    assert second["spec"]["nodeName"] != node
    assert (shared / "saved").exists()
    (shared / "go").touch()
    assert condition(kubernetes.api.until(path, ended), "Complete")


def test_a_container_gets_no_more_than_the_pod_asks_for(kubernetes: Cluster, team: str) -> None:
    """Non-root, a root filesystem that cannot be written to, secrets by reference: as in a cluster that insists."""
    token = {"metadata": {"name": "token"}, "stringData": {"key": "sesame"}}
    kubernetes.api.create(f"/api/v1/namespaces/{team}/secrets", token)
    script = """set -e
        test "$(id -u)" = 1000
        test "$SECRET" = sesame
        ! touch /here 2>/dev/null
        echo x > /tmp/here
        df --output=size -m /dev/shm | tail -1 | grep -qw 128
        python -c 'import shoal'
    """
    security = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    pod = {
        "securityContext": {"runAsUser": 1000, "runAsNonRoot": True, "fsGroup": 1000},
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}},
        ],
    }
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    environment = [{"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "token", "key": "key"}}}]
    job = a_job("modest", script, pod=pod, securityContext=security, volumeMounts=mounts, env=environment)
    done = kubernetes.api.until(submit(kubernetes, team, job), ended)
    (ran,) = pods(kubernetes, team)
    assert condition(done, "Complete"), kubernetes.kubectl("logs", "-n", team, ran["metadata"]["name"])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"image": "elsewhere/none:1"}, "ImagePullBackOff"),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "k"}}}]},
            "CreateContainerConfigError",
        ),
    ],
)
def test_what_cannot_start_says_why(kubernetes: Cluster, team: str, changed: Object, reason: str) -> None:
    submit(kubernetes, team, a_job("stuck", "true", **changed))
    kubernetes.api.until(f"/apis/batch/v1/namespaces/{team}/jobs/stuck", lambda job: job["status"].get("active") == 1)
    (pod,) = pods(kubernetes, team)

    def waits(pod: Object) -> bool:
        (status,) = pod["status"].get("containerStatuses") or [{"state": {}}]
        return bool(status["state"].get("waiting", {}).get("reason") == reason)

    kubernetes.api.until(f"/api/v1/namespaces/{team}/pods/{pod['metadata']['name']}", waits)
