"""Shoal's runs as JobSets, and in queues of Kueue, both as their projects release them, on a real Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml
from tests.clusters.api import Object
from tests.clusters.kubernetes import IMAGE, Cluster, cluster
from tests.clusters.kubernetes_place import Place, place

pytestmark = [pytest.mark.cluster, pytest.mark.uses("kubernetes")]
KUEUE = "kueue.x-k8s.io/v1beta2"
QUEUED = {"launch.queue": "team", "launch.kubernetes.kueue": True}


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Cluster]:
    with cluster("one", "two") as made:
        made.start_jobset()
        made.start_kueue()
        yield made


@pytest.fixture(scope="module")
def here(kubernetes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(kubernetes, tmp_path_factory.mktemp("place")) as made:
        _make_queue(made, cores=2)
        yield made


@pytest.fixture(scope="module")
def undisturbed(here: Place) -> str:
    return here.undisturbed()


def _make_queue(here: Place, cores: int) -> None:
    amounts = [{"name": "cpu", "nominalQuota": cores}]
    group = {"coveredResources": ["cpu"], "flavors": [{"name": "any", "resources": amounts}]}
    _create(here, "ResourceFlavor", "any", {})
    _create(here, "ClusterQueue", "all", {"namespaceSelector": {}, "resourceGroups": [group]})
    _create(here, "LocalQueue", "team", {"clusterQueue": "all"}, f"/namespaces/{here.namespace}")


def _create(here: Place, kind: str, name: str, spec: Object, within: str = "") -> None:
    thing = {"apiVersion": KUEUE, "kind": kind, "metadata": {"name": name}, "spec": spec}
    here.api.create(f"/apis/{KUEUE}{within}/{kind.lower()}s", thing)


def test_a_jobset_is_made_where_the_cluster_knows_them_and_survives_a_killed_pod(here: Place, undisturbed: str) -> None:
    job = here.submit("set", **{"launch.kubernetes.jobset": "auto"})
    assert job.where["kind"] == "jobsets.jobset.x-k8s.io"
    here.trains(job, 40)
    here.cluster.kill(here.pods(job)[0])
    end = here.ends(job)
    assert (end.phase, end.restarts) == ("done", 1), here.log(job)
    assert here.digest(job) == undisturbed


def test_a_jobset_with_a_wrong_spec_is_not_started_again(here: Place) -> None:
    job = here.submit("wrong", **{"data.train": "/workspace/nothing", "launch.kubernetes.jobset": True})
    end = here.ends(job)
    assert (end.phase, end.exit_code, end.restarts) == ("failed", 78, 0), here.log(job)


@pytest.mark.parametrize("jobset", [False, True])
def test_a_full_queue_is_said_and_waited_for(here: Place, jobset: bool) -> None:
    with _occupied(here):
        asks = {**QUEUED, "launch.kubernetes.jobset": jobset, "train.steps": 5}
        job = here.submit(f"second-{jobset}".lower(), pace_s=0, **asks)
        waits = here.until(job, lambda state: "quota is full" in state.why)
        assert waits.phase == "waiting"
        assert waits.why == "Kueue's quota is full: 2 more cpu are needed in flavor any"
    assert here.ends(job).phase == "done", here.log(job)


@contextmanager
def _occupied(here: Place) -> Iterator[None]:
    """Somebody else has all of the queue's quota."""
    container = {"name": "main", "image": IMAGE, "command": ["sleep", "300"], "resources": {"requests": {"cpu": "2"}}}
    container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    safe = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"restartPolicy": "Never", "securityContext": safe, "containers": [container]}
    pod["terminationGracePeriodSeconds"] = 0
    jobs = f"/apis/batch/v1/namespaces/{here.namespace}/jobs"
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    job = {"metadata": {"name": "other", "labels": labels}, "spec": {"suspend": True, "template": {"spec": pod}}}
    here.api.create(jobs, job)
    here.api.until(f"{jobs}/other", lambda job: job["status"].get("active") == 1)
    try:
        yield
    finally:
        here.api.delete(f"{jobs}/other", propagationPolicy="Background")


def test_the_api_server_takes_a_jobset_with_all_that_a_run_file_can_ask_for(here: Place) -> None:
    asks = {"launch.gpus": 8, "launch.kubernetes.jobset": True, "launch.kubernetes.topology": "rack", **QUEUED}
    request = here.request("all", **asks, **{"launch.priority": "urgent", "resources.device": "auto"})
    (part,) = here.backend.render(request)
    said = here.cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=part.text)
    kinds = [document["kind"] for document in yaml.safe_load_all(part.text)]
    assert said.count("created (server dry run)") == len(kinds), said
    assert {"JobSet", "ConfigMap", "Secret", "NetworkPolicy"} == set(kinds)
