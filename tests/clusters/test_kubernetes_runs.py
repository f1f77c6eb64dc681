"""Shoal's runs on a real Kubernetes: they train on two nodes, lose pods and nodes, wait, stop, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from tests.clusters.kubernetes import Cluster, cluster
from tests.clusters.kubernetes_place import Place, place

from shoal.journal.rundir import RunDir
from shoal.launch.job import remembered
from shoal.spec import dump

pytestmark = [pytest.mark.cluster, pytest.mark.uses("kubernetes")]


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Cluster]:
    with cluster("one", "two", "three", gpus=8, lost_after_s=15) as made:
        yield made


@pytest.fixture(scope="module")
def here(kubernetes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(kubernetes, tmp_path_factory.mktemp("place")) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(here: Place) -> str:
    return here.undisturbed()


def test_launched_from_the_shell_two_nodes_end_as_one_machine_does(here: Place, undisturbed: str) -> None:
    request = here.request("two", pace_s=0)
    file = here.folder / "two.yaml"
    file.write_text(dump(request.run))
    assert "sent run two to kubernetes research/two: 2 nodes of 1 process" in here.shoal("launch", str(file))
    job = remembered(RunDir.of("two", request.workspace))
    assert job is not None
    log = here.shoal("logs", "-f", "two")
    assert "run two done at step 120 of 120" in log, log
    end = here.state(job)
    assert (end.phase, end.exit_code, end.restarts) == ("done", 0, 0), log
    assert len(set(end.nodes)) == 2
    assert here.digest(job) == undisturbed
    assert "finished" in here.shoal("ps")


def test_a_killed_pod_is_replaced_and_the_run_ends_the_same(here: Place, undisturbed: str) -> None:
    """Node 1's. That of node 0, which supervises, is killed in test_kubernetes_queues.py."""
    job = here.submit("killed")
    here.trains(job, 40)
    here.cluster.kill(here.pods(job)[1])
    end = here.ends(job)
    assert (end.phase, end.restarts) == ("done", 1), here.log(job)
    assert here.digest(job) == undisturbed


def test_a_drained_node_is_left_after_saving(here: Place, undisturbed: str) -> None:
    job = here.submit("drained")
    here.trains(job, 40)
    node = here.pods(job)[1]["spec"]["nodeName"]
    try:
        here.cluster.kubectl("drain", node, "--force", "--delete-emptydir-data", "--timeout=60s")
        end = here.ends(job)
    finally:
        here.cluster.kubectl("uncordon", node)
    assert end.phase == "done", here.log(job)
    assert node not in end.nodes
    assert here.digest(job) == undisturbed
    assert not here.kinds(job, "failure"), "told in time, it lost nothing"


def test_a_machine_that_is_gone_is_replaced_by_another(here: Place, undisturbed: str) -> None:
    """Somebody must say that it is out of service, a person or a cloud's controller: until then Kubernetes believes
    that its pods may still run, and starts no others in their place."""
    job = here.submit("lost")
    here.trains(job, 40)
    node = here.pods(job)[1]["spec"]["nodeName"]
    here.cluster.lose_node(node)
    here.cluster.kubectl("taint", "node", node, "node.kubernetes.io/out-of-service=gone:NoExecute")
    try:
        end = here.ends(job)
        assert end.phase == "done", here.log(job)
        assert node not in end.nodes
        assert here.digest(job) == undisturbed
        assert [r["cause"] for r in here.kinds(job, "failure")] == ["node-lost"]
    finally:
        here.api.delete(f"/api/v1/nodes/{node}")
        here.cluster.add_node(f"{node}-again", gpus=8)


def test_with_room_for_fewer_nodes_it_begins_and_grows_when_there_is_more(here: Place) -> None:
    nodes = list(here.cluster.kubelets)
    here.cluster.kubectl("cordon", *nodes[1:])
    try:
        asks = {"launch.min_nodes": 1, "launch.cpus": 5, "train.steps": 10_000}  # a node has 8
        job = here.submit("elastic", **asks)
        here.trains(job, 1)
        state = here.state(job)
        assert state.phase == "running"
        assert "1 of 2 nodes run; for the others: no room on any of 3 nodes" in state.why, state.why
    finally:
        here.cluster.kubectl("uncordon", *nodes[1:])
    here.trains(job, 1, attempt=1)
    assert [r["world"] for r in here.kinds(job, "attempt")] == [1, 2]
    assert not here.kinds(job, "failure")
    here.backend.stop(job, now=True)


def test_the_time_limit_is_near_so_it_saves_and_goes_on(here: Place, undisturbed: str) -> None:
    job = here.submit("long", **{"launch.time_limit": "1 h"})
    here.trains(job, 40)
    for pod in here.pods(job):  # an hour later
        path = f"/api/v1/namespaces/{here.namespace}/pods/{pod['metadata']['name']}"
        here.api.patch(path, {"spec": {"activeDeadlineSeconds": 1}})
    end = here.ends(job)
    assert end.phase == "done", here.log(job)
    assert here.digest(job) == undisturbed
    assert 143 in [r["exit_code"] for r in here.kinds(job, "close")]
    assert not here.kinds(job, "failure")


def test_a_wrong_spec_is_not_started_again(here: Place) -> None:
    job = here.submit("wrong", **{"data.train": "/workspace/nothing"})
    end = here.ends(job)
    assert (end.phase, end.exit_code, end.restarts) == ("failed", 78, 0), here.log(job)
    assert "/workspace/nothing" in end.why, end.why


def test_stop_saves_and_launched_again_it_goes_on(here: Place, undisturbed: str) -> None:
    job = here.submit("told")
    here.trains(job, 10)
    here.backend.stop(job, now=False)
    end = here.ends(job)
    assert end.phase in ("stopped", "gone")
    saved = here.kinds(job, "checkpoint")[-1]["step"]
    assert saved == max(r["step"] for r in here.kinds(job, "step"))
    again = here.submit("told", pace_s=0)
    assert here.ends(again).phase == "done", here.log(again)
    assert here.digest(again) == undisturbed


def test_a_full_quota_is_said_and_waited_for(here: Place) -> None:
    quotas = f"/api/v1/namespaces/{here.namespace}/resourcequotas"
    here.api.create(quotas, {"metadata": {"name": "cores"}, "spec": {"hard": {"requests.cpu": "1"}}})
    here.api.until(f"{quotas}/cores", lambda quota: "hard" in quota.get("status", {}))
    try:
        job = here.submit("rich", pace_s=0, **{"train.steps": 5})
        waits = here.until(job, lambda state: "quota" in state.why)
        assert waits.phase in ("waiting", "starting")
        assert "the quota 'cores' of the namespace is full: 1 of 1 cpu are used and it asks for 1 more" in waits.why
        here.api.patch(f"{quotas}/cores", {"spec": {"hard": {"requests.cpu": "2"}}})
        assert here.ends(job).phase == "done", here.log(job)
    finally:
        here.api.delete(f"{quotas}/cores")


def test_no_room_is_said_with_what_is_missing(here: Place) -> None:
    job = here.submit("large", **{"launch.cpus": 99})
    waits = here.until(job, lambda state: "no room" in state.why)
    assert waits.phase == "waiting"
    assert waits.why == "no room on any of 3 nodes: 3 have too little cpu free"
    here.backend.stop(job, now=True)
    here.ends(job)


def test_the_api_server_takes_every_manifest(here: Place) -> None:
    """All that a run file can ask for at once, looked at by the server and by the rules for restricted pods."""
    priority = {"metadata": {"name": "urgent"}, "value": 1000}
    here.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", priority)
    request = here.request(
        "all",
        **{
            "launch.gpus": 8,
            "launch.gpu_type": "NVIDIA-H100-80GB-HBM3",
            "launch.min_nodes": 1,
            "launch.memory_gb": 64,
            "launch.time_limit": "2 h",
            "launch.priority": "urgent",
            "launch.secrets": {"A": "env:HOME", "B": "kubernetes:mine/key", "C": "file:/run/secret"},
            "launch.setup": ["echo ready"],
            "launch.kubernetes.tolerations": ["spot"],
            "launch.kubernetes.node_selector": {"pool": "gpus"},
            "launch.kubernetes.rdma": {"rdma/ib": 8},
            "launch.kubernetes.pull_secret": "registry",
            "launch.kubernetes.service_account": "trainer",
            "resources.device": "auto",
        },
    )
    for text in (part.text for part in here.backend.render(request)):
        kinds = [document["kind"] for document in yaml.safe_load_all(text)]
        said = here.cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
        assert said.count("created (server dry run)") == len(kinds), said
        assert {"Job", "Service", "ConfigMap", "Secret", "NetworkPolicy"} == set(kinds)
