"""What a cluster's objects mean, and its refusals, in one plain sentence. The texts are those of Kubernetes 1.37.1,
JobSet 0.12 and Kueue 0.19.1 as a real control plane printed them (2026-11), but for those marked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.train.tiny import make_run

from shoal.errors import SetupError, ShoalError, TransientError, UsageError
from shoal.launch.backend import State
from shoal.launch.bundle import Bundle
from shoal.launch.job import Job
from shoal.launch.kubernetes import logs, states, why
from shoal.launch.kubernetes.backend import Kubernetes
from shoal.launch.kubernetes.client import Cluster, Refused
from shoal.launch.kubernetes.cores import with_cores
from shoal.launch.kubernetes.states import Seen, state
from shoal.launch.kubernetes.things import thing
from shoal.launch.request import Request

NO_GPU = (
    "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available: "
    "2 Preemption is not helpful for scheduling."
)
QUOTA = (
    'Error creating: pods "demo-0-wkgcj" is forbidden: exceeded quota: few, requested: '
    "requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=12, limited: requests.nvidia.com/gpu=16"
)
Object = dict[str, Any]


def a_job(name: str = "demo", nodes: int = 2, suspend: bool = False, where: str = "jobs.batch", **more: Any) -> Object:
    labels = {"shoal/job": name, **({"kueue.x-k8s.io/queue-name": "team"} if suspend else {})}
    metadata = {"name": name, "uid": f"uid-{name}", "labels": labels, **more.pop("metadata", {})}
    spec = {"completions": nodes, "suspend": suspend, **more.pop("spec", {})}
    return {"kind": "Job", "metadata": metadata, "spec": spec, "status": more}


def a_pod(index: int, phase: str, name: str = "demo", at: str = "2026-11-16T02:00:00Z", **status: Any) -> Object:
    metadata = {
        "name": f"{name}-{index}-abcde",
        "uid": f"pod-{index}",
        "labels": {"shoal/job": name},
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        "creationTimestamp": at,
    }
    node = {} if phase == "Pending" and "containerStatuses" not in status else {"nodeName": f"node-{index}"}
    return {"kind": "Pod", "metadata": metadata, "spec": node, "status": {"phase": phase, **status}}


def waits(reason: str, message: str = "") -> Object:
    return {"containerStatuses": [{"image": "x:1", "state": {"waiting": {"reason": reason, "message": message}}}]}


def ended(code: int, message: str = "", reason: str = "Error") -> Object:
    terminated = {"exitCode": code, "reason": reason, "message": message, "startedAt": "2026-11-16T02:00:01Z"}
    return {"containerStatuses": [{"state": {"terminated": terminated}}]}


def unscheduled(message: str) -> Object:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [said]}


def warning(uid: str, message: str) -> Object:
    return {"kind": "Event", "metadata": {}, "involvedObject": {"uid": uid}, "message": message}


def condition(kind: str, reason: str = "", message: str = "") -> Object:
    told = {"type": kind, "status": "True", "reason": reason, "message": message}
    return {"conditions": [{**told, "lastTransitionTime": "2026-11-16T03:00:00Z"}]}


def workload(message: str, **more: Any) -> Object:
    reserved = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
    owner = {"ownerReferences": [{"uid": "uid-demo"}]}
    return {"kind": "Workload", "metadata": owner, "spec": {}, "status": {"conditions": [reserved]}, **more}


def seen(*objects: Object, where: dict[str, str] | None = None) -> State:
    job = Job("demo", "kubernetes", "team/demo", 0.0, 2, 0, "/data", "0" * 64, where or {})
    return state(job, Seen.of(objects))


@pytest.mark.parametrize(
    ("objects", "phase", "sentence"),
    [
        ([], "gone", "the cluster has it no more"),
        ([a_job()], "waiting", "the cluster has not made its pods yet"),
        ([a_job(), warning("uid-demo", QUOTA)], "waiting",
         "the quota 'few' of the namespace is full: 12 of 16 nvidia.com/gpu are used and it asks for 8 more"),
        ([a_job(), a_pod(0, "Pending", **unscheduled(NO_GPU))], "waiting",
         "no room on any of 2 nodes: 2 have too little nvidia.com/gpu free"),
        ([a_job(), a_pod(0, "Pending", **unscheduled(
            "0/9 nodes are available: 1 node(s) were unschedulable, 3 node(s) had untolerated taint {gpu: yes}, "
            "5 node(s) didn't match Pod's node affinity/selector. preemption: 0/9 nodes are available."))], "waiting",
         "no room on any of 9 nodes: 1 are closed (cordoned), 3 keep it away by the taint {gpu: yes}, 5 have not the "
         "labels it wants"),  # the texts of kube-scheduler's plugins, put together
        ([a_job(), a_pod(0, "Pending", **unscheduled(
            '0/2 nodes are available: persistentvolumeclaim "nope" not found. not found'))], "waiting",
         "there is no PersistentVolumeClaim 'nope'; create it, or mend launch.volumes"),
        ([a_job(), a_pod(0, "Running"), a_pod(1, "Pending", **waits("ImagePullBackOff", "manifest unknown"))],
         "starting", "1 of 2 nodes run; the image x:1 cannot be pulled (there is none)"),
        ([a_job(), a_pod(0, "Pending", **waits("ErrImagePull", "401 Unauthorized"))], "starting",
         "the image x:1 cannot be pulled (the registry does not let it in: launch.kubernetes.pull_secret)"),
        ([a_job(), a_pod(0, "Pending", **waits("CreateContainerConfigError", 'secret "nope" not found'))], "starting",
         "there is no Secret 'nope'; create it, or mend launch.secrets"),
        ([a_job(), a_pod(0, "Pending", **waits("CrashLoopBackOff"))], "starting", "its container ends as soon as"),
        ([a_job(), a_pod(0, "Running"), a_pod(1, "Running")], "running", "2 nodes run"),
        ([a_job(spec={"successPolicy": {}}), a_pod(0, "Running"), a_pod(1, "Pending", **unscheduled(NO_GPU))],
         "running", "1 of 2 nodes run; for the others: no room on any of 2 nodes"),
        ([a_job(metadata={"deletionTimestamp": "x"}), a_pod(0, "Running")], "running",
         "told to stop; 1 of its pods still save"),
        ([a_job(**condition("Complete")), a_pod(0, "Succeeded"), a_pod(1, "Succeeded")], "done", "done"),
        ([a_job(), a_pod(0, "Failed", **ended(78, "step 1\nshoal: there is no data.\n"))], "failed",
         "exit code 78, the environment or the data is wrong; a retry cannot help: there is no data"),
        ([a_job(**condition("Failed", "PodFailurePolicy",
                            "Container agent for pod t/demo-1-p2l6f failed with exit code 2 matching FailJob rule"))],
         "failed", "exit code 2, the command or the run file is wrong; a retry cannot help"),  # its pod is gone
        ([a_job(**condition("Failed", "MaxFailedIndexesExceeded")), a_pod(0, "Failed", **ended(137, "", "OOMKilled"))],
         "failed", "started again as often as launch.requeues allows, the last time: it used more memory than "
         "launch.memory_gb allows and was killed (OOMKilled)"),
        ([a_job(), a_pod(0, "Failed", **ended(75)), a_pod(1, "Failed", **ended(75))], "waiting",
         "it is started again after a while, because of: exit code 75, a failure that a retry may cure"),
        ([a_job(), a_pod(1, "Running"), a_pod(0, "Failed", **ended(137) | condition(
            "DisruptionTarget", "PreemptionByScheduler"))], "starting",
         "1 of 2 nodes run; it is started again after a while, because of: preempted: its place was needed"),
        ([a_job(), a_pod(0, "Failed", reason="Evicted", message="low on memory.")], "waiting",
         "because of: its node evicted it (low on memory)"),
        ([a_job(), a_pod(0, "Failed", reason="DeadlineExceeded", **ended(143))], "waiting",
         "because of: launch.time_limit was reached"),
        ([a_job(suspend=True)], "waiting", "Kueue has not taken it in yet"),
        ([a_job(suspend=True), workload("LocalQueue team doesn't exist")], "waiting",
         "its Kueue queue cannot be used: LocalQueue team doesn't exist"),
        ([a_job(suspend=True), workload(
            "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor plain, "
            "2 more needed")], "waiting", "Kueue's quota is full: 2 more cpu are needed in flavor plain"),
        ([a_job(suspend=True), workload(
            "couldn't assign flavors to pod set main: insufficient quota for cpu in flavor plain, previously "
            "considered podsets requests (0) + current podset request (6) > maximum capacity (2)")], "waiting",
         "it can never start: it asks for 6 cpu, and its Kueue queue has 2 in all"),
        ([a_job(suspend=True), workload("", spec={"active": False})], "waiting", "somebody has switched"),
    ],
)  # fmt: skip
def test_the_objects_of_a_job_are_one_sentence(objects: list[Object], phase: str, sentence: str) -> None:
    found = seen(*objects)
    assert found.phase == phase
    assert sentence in found.why
    assert not found.why.endswith(".")


def test_restarts_and_nodes_are_those_of_the_newest_pods() -> None:
    old = [a_pod(0, "Failed", at="2026-11-16T01:00:00Z", **ended(75))]
    old[0]["spec"]["nodeName"] = "bad-node"
    found = seen(a_job(), *old, a_pod(0, "Running"), a_pod(1, "Running"))
    assert (found.phase, found.restarts, found.nodes) == ("running", 1, ("node-0", "node-1"))


def test_a_jobset_is_seen_through_the_job_inside() -> None:
    outer = {**a_job(), "kind": "JobSet", "spec": {"replicatedJobs": []}}
    inner = a_job(metadata={"uid": "inner"})
    inner["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = "demo"
    found = seen(outer, inner, a_pod(0, "Running"), a_pod(1, "Running"))
    assert (found.phase, found.why) == ("running", "2 nodes run")
    assert seen(outer).why == "the JobSet controller has not made its job yet"


@pytest.mark.parametrize(
    ("stderr", "kind", "sentence"),
    [
        ('Error from server (NotFound): error when creating "STDIN": namespaces "nowhere" not found', SetupError,
         "has no namespace 'nowhere'; create it, or mend launch.kubernetes.namespace."),
        ('Error from server (Forbidden): error when creating "STDIN": jobs.batch is forbidden: User "ann" cannot '
         'create resource "jobs" in API group "batch" in the namespace "team"', SetupError,
         "does not let you create jobs in namespace 'team'; ask its owner for the role of Shoal's chart"),
        ('Error from server (Forbidden): error when creating "STDIN": jobs.batch "demo" is forbidden: exceeded quota: '
         "q, requested: count/jobs.batch=1, used: count/jobs.batch=5, limited: count/jobs.batch=5", SetupError,
         "the quota 'q' of the namespace is full: 5 of 5 count/jobs.batch are used and it asks for 1 more."),
        ('The Job "demo" is invalid: spec.template.spec.containers[0].image: Required value', UsageError,
         "refuses it as invalid: spec.template.spec.containers[0].image: Required value; mend the launch section."),
        ('Error from server (Forbidden): error when creating "STDIN": admission webhook "policy.example" denied the '
         "request: no hostPath here", UsageError, "refuses it: no hostPath here (says policy.example)."),
        ("Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout", TransientError, "does not answer"),
        ("The connection to the server 127.0.0.1:1 was refused - did you specify the right host or port?",
         TransientError, "does not answer"),
        ("error: You must be logged in to the server (Unauthorized)", SetupError, "log in to it again"),
        ('error: context "prod" does not exist', SetupError, 'context "prod" does not exist'),
        ('error: the server doesn\'t have a resource type "jobsets"', SetupError, "lacks a kind of object"),
    ],
)  # fmt: skip
def test_what_kubectl_says_is_one_sentence(stderr: str, kind: type[ShoalError], sentence: str) -> None:
    cluster = Cluster("prod")
    error = cluster._error(stderr)
    if isinstance(error, Refused):
        error = why.refusal(error, cluster.spoken, "team")
    assert type(error) is kind
    assert sentence in str(error)
    assert "prod" in str(error)


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that prints `answer` and notes what it was asked."""
    program = tmp_path / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\ncat {tmp_path}/answer\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_a_thousand_jobs_are_asked_for_once(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(states, "thing", lambda said: read.append(said) or thing(said))
    jobs = [Job(f"r{i}", "kubernetes", f"team/r{i}", 0.0, 1, 0, "/d", "0", {"context": "prod"}) for i in range(1000)]
    running = [each for i in range(1000) for each in (a_job(f"r{i}", 1), a_pod(0, "Running", f"r{i}"))]
    (kubectl / "answer").write_text(json.dumps({"items": running}))
    found = Kubernetes().states(jobs)
    assert {s.phase for s in found.values()} == {"running"}
    assert len(found) == 1000
    (asked,) = (kubectl / "asked").read_text().splitlines()
    assert asked.startswith("--context=prod get jobs.batch,pods -n team -o json")
    assert len(read) == len(running), "each object once, not once a job"


def test_a_cluster_that_is_away_does_not_hide_the_others(kubectl: Path) -> None:
    (kubectl / "kubectl").write_text(
        f'#!/bin/sh\ncase "$*" in *away*) echo "Unable to connect to the server: EOF" >&2; exit 1;; esac\n'
        f"cat {kubectl}/answer\n"
    )
    (kubectl / "answer").write_text(json.dumps({"items": [a_job("a", 1), a_pod(0, "Running", "a")]}))
    jobs = [Job(n, "kubernetes", f"team/{n}", 0.0, 1, 0, "/d", "0", {"context": c}) for n, c in ("ax", "bx", "ca")]
    jobs[2] = Job("c", "kubernetes", "team/c", 0.0, 1, 0, "/d", "0", {"context": "away"})
    found = Kubernetes().states(jobs)
    assert [found[f"team/{n}"].phase for n in "abc"] == ["running", "gone", "unknown"]
    assert found["team/c"].why.startswith("the cluster of context 'away' does not answer")


def test_logs_of_all_pods_are_one_stream_by_time(kubectl: Path) -> None:
    (kubectl / "answer").write_text(
        "[pod/demo-0-abcde/agent] 2026-11-16T02:00:01.5Z first\n"
        "[pod/demo-0-abcde/agent] 2026-11-16T02:00:03Z third\n"
        "error: something of kubectl's own\n"
        "[pod/demo-12-fghij/agent] 2026-11-16T02:00:01.51Z second\n"
        "[pod/demo-12-fghij/agent] 2026-11-16T02:00:04.000000001Z \n"
    )
    job = Job("demo", "kubernetes", "team/demo", 0.0, 2, 0, "/d", "0")
    assert list(Kubernetes().logs(job, False, None)) == ["[0] first", "[12] second", "[0] third", "[12] "]
    assert list(Kubernetes().logs(job, False, 1)) == ["[12] "]
    followed = logs.follow(Cluster(), "team", "demo", 2, over=lambda: True)
    assert list(followed) == ["[0] third", "[12] "]  # each once, though it was read twice


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    job = Job("demo", "kubernetes", "team/demo", 0.0, 2, 0, "/d", "0")
    with pytest.raises(SetupError, match="needs the program kubectl"):
        Kubernetes().stop(job, now=False)
    assert "kubectl" in Kubernetes().states([job])[job.id].why
    nowhere = Cluster()._error("The connection to the server localhost:8080 was refused - did you specify …?")
    assert str(nowhere) == "kubectl knows no cluster; log in to one, or set KUBECONFIG."


def a_node(cpu: str, gpus: str | None, **spec: Any) -> dict[str, Any]:
    return {"spec": spec, "status": {"allocatable": {"cpu": cpu, **({"nvidia.com/gpu": gpus} if gpus else {})}}}


def test_cores_go_with_the_gpus_as_the_clusters_nodes_have_them(kubectl: Path) -> None:
    nodes = [a_node("191500m", "8"), a_node("223", "8"), a_node("64", "8", unschedulable=True), a_node("16", None)]
    nodes += [a_node("x", "8"), a_node("96", "4"), {}]
    (kubectl / "answer").write_text(json.dumps({"items": nodes}))
    cluster = Cluster("prod")

    def cores(**launch: Any) -> int:
        about = {f"launch.{name}": value for name, value in {"on": "kubernetes", "image": "x", **launch}.items()}
        run = make_run(Path("/data"), **about, **{"resources.device": "cuda"})
        return with_cores(Request(run, Path("/here"), Bundle({})), cluster).cpus

    assert cores(gpus=8) == 167, "seven eighths of the least node with eight"
    assert cores(gpus=4) == 83
    assert cores(gpus=8, cpus=12) == 12
    assert cores(gpus=16) == 16, "no node has as many: the scheduler will say so"
    assert cores(gpus=8, gpu_type="NVIDIA H100") == 167
    asked = (kubectl / "asked").read_text().splitlines()
    assert "get nodes" in asked[0]
    assert "--selector=nvidia.com/gpu.product=NVIDIA-H100" in asked[-1]
    (kubectl / "kubectl").write_text("#!/bin/sh\necho 'Error from server (Forbidden): no' >&2; exit 1\n")
    assert cores(gpus=8) == 8, "one a process, and no limit, where nobody may ask"


def test_a_shortage_is_named_without_the_full_stop_that_ends_its_sentence() -> None:
    """Kubernetes 1.36 goes on with another one, that begins with no number."""
    said = (
        "0/2 nodes are available: 2 Insufficient cpu. no new claims to deallocate, preemption: 0/2 nodes are available."
    )
    for message in (said, "0/2 nodes are available: 2 Insufficient cpu."):
        assert "2 have too little cpu free" in why.unscheduled(message)
