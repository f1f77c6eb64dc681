"""What Kubernetes is sent: valid by its schemas in every variant, the same every time, no secret in sight."""

from __future__ import annotations

import copy
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.schemas import Wrong, validate
from tests.train.tiny import make_run

from shoal.errors import ShoalError, SpecError, UsageError
from shoal.launch.bundle import Bundle
from shoal.launch.kubernetes import manifests, pod
from shoal.launch.kubernetes.backend import Kubernetes
from shoal.launch.ray import rayjob
from shoal.launch.request import Request

PLAIN: dict[str, Any] = {
    "launch.on": "kubernetes",
    "launch.image": "registry.example/shoal:0.1.0",
    "launch.workspace": "/data/space",
    "launch.volumes": [{"at": "/data", "claim": "shared"}],
}
GPUS = {"launch.nodes": 4, "launch.gpus": 8, "resources.device": "cuda", "launch.gpu_type": "NVIDIA H100 80GB HBM3"}
RDMA = {**GPUS, "launch.kubernetes.rdma": {"rdma/ib": 8}, "launch.memory_gb": 900, "launch.cpus": 96}
KUEUE = {"launch.kubernetes.kueue": True, "launch.queue": "team", "launch.priority": "high"}
ALL = {
    "launch.nodes": 4,
    "launch.min_nodes": 2,
    "launch.time_limit": "4 h",
    "launch.priority": "high",
    "launch.env": {"NCCL_DEBUG": "WARN", "PRICE": "$(HOME)"},
    "launch.setup": ["export A=1"],
    "launch.secrets": {"HF_TOKEN": "env:MY_TOKEN", "KEY": "kubernetes:store/key", "SALT": "file:/data/it's salt"},
    "launch.volumes": [
        {"at": "/data", "claim": "shared"},
        {"at": "/corpus", "host": "/mnt/corpus", "read_only": True},
    ],
    "launch.kubernetes.service_account": "trainer",
    "launch.kubernetes.pull_secret": "registry",
    "launch.kubernetes.tolerations": ["spot"],
    "launch.kubernetes.node_selector": {"pool": "train"},
}
VARIANTS = {
    "cpu": {},
    "gpu": GPUS,
    "rdma": RDMA,
    "amd": {**GPUS, "launch.gpu_type": "AMD_Instinct_MI300X_OAM"},
    "kueue": {**GPUS, **KUEUE, "launch.kubernetes.topology": "cloud.example/rack"},
    "kueue elastic": {**GPUS, **KUEUE, "launch.min_nodes": 2},
    "all": ALL,
    "metrics": {"launch.kubernetes.metrics": True},
    "no policy": {"launch.kubernetes.network_policy": False},
}


def request_of(changes: dict[str, Any] | None = None, files: dict[str, bytes] | None = None) -> Request:
    run = make_run(Path("/data/tokens"), **{**PLAIN, **(changes or {})})
    bundle = Bundle({"run.yaml": b"name: tiny\n", **(files or {})})
    return Request(run, Path("/here"), bundle, token="ab" * 32)


def documents(request: Request, as_jobset: bool = False) -> list[dict[str, Any]]:
    return [manifests.job(request, as_jobset), *manifests.belongings(request, as_jobset)]


def job_of(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    return manifests.job(request_of(changes), as_jobset=False)


def container_of(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    (container,) = job_of(changes)["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("as_jobset", [False, True], ids=["job", "jobset"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_valid_for_every_supported_kubernetes(variant: str, as_jobset: bool) -> None:
    made = documents(request_of(VARIANTS[variant]), as_jobset)
    owners = manifests.owned_by({**made[0], "metadata": {**made[0]["metadata"], "uid": "1-2-3"}})
    for document in [*made, {**made[1], "metadata": {**made[1]["metadata"], "ownerReferences": owners}}]:
        validate(document)
    kinds = [document["kind"] for document in made]
    assert ("Service" in kinds) != as_jobset  # JobSet makes its own
    assert ("NetworkPolicy" in kinds) == (variant != "no policy")


def _misspelt(keys: str, wrong: str) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        *path, last = keys.split(".")
        for key in path:
            document = document[int(key) if key.isdecimal() else key]
        document[wrong] = document.pop(last)

    return change


@pytest.mark.parametrize(
    ("as_jobset", "change"),
    [
        (False, _misspelt("spec.backoffLimitPerIndex", "backoffLimitPerIndexes")),
        (False, _misspelt("spec.template.spec.containers.0.env", "environment")),
        (True, _misspelt("spec.failurePolicy.maxRestarts", "restarts")),
        (True, _misspelt("spec.replicatedJobs.0.template.spec.template.spec.subdomain", "domain")),
        (True, _misspelt("spec.replicatedJobs.0.template.spec.podFailurePolicy.rules.0.onExitCodes", "onExit")),
    ],
)
def test_a_misspelt_field_is_found(as_jobset: bool, change: Callable[[Any], None]) -> None:
    document = copy.deepcopy(manifests.job(request_of(), as_jobset))
    if as_jobset:
        document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["subdomain"] = "x"
    change(document)
    with pytest.raises(Wrong):
        validate(document)


def test_what_is_rendered_is_what_is_sent_but_for_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(ALL)
    (rendered,) = Kubernetes().render(request)
    assert rendered == Kubernetes().render(request_of(ALL))[0]
    assert request.token not in rendered.text
    assert list(yaml.safe_load_all(rendered.text)) == documents(request)  # without $MY_TOKEN in this shell
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    _, secret, *_ = manifests.belongings(request, as_jobset=False, secrets=request.secret_env())
    assert secret["stringData"] == {"SHOAL_TOKEN": request.token, "HF_TOKEN": "hunter2"}


def test_each_exit_code_has_its_rule_and_the_first_that_fits_counts() -> None:
    """In the order of the Job controller: a rule on codes looks at the container's, one on conditions at the pod's."""

    def action(code: int, disrupted: bool = False) -> str:
        for rule in job_of()["spec"]["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return rule["action"]
            if disrupted and rule.get("onPodConditions"):
                return rule["action"]
        return "Count"

    assert {code: action(code) for code in (2, 78, 75, 143, 137, 1)} == {
        2: "FailJob", 78: "FailJob", 75: "Count", 143: "Ignore", 137: "Count", 1: "Count"
    }  # fmt: skip
    assert action(137, disrupted=True) == "Ignore"
    assert action(78, disrupted=True) == "FailJob"


def test_the_agents_know_who_they_are_and_where_the_head_is() -> None:
    def environment(container: dict[str, Any]) -> dict[str, Any]:
        return {e["name"]: e.get("value") or e["valueFrom"] for e in container["env"]}

    found = environment(container_of(ALL))
    assert found["SHOAL_HEAD"] == "tiny-0.tiny:29400"
    assert found["SHOAL_NODES"] == "4"
    assert found["SHOAL_NODE"]["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
    assert found["SHOAL_TOKEN"]["secretKeyRef"] == {"name": "tiny", "key": "SHOAL_TOKEN"}
    assert found["KEY"]["secretKeyRef"] == {"name": "store", "key": "key"}
    assert found["PRICE"] == "$$(HOME)"  # as it was written: Kubernetes puts nothing in its place
    template = manifests.job(request_of(ALL), as_jobset=True)["spec"]["replicatedJobs"][0]["template"]["spec"]
    in_set = environment(template["template"]["spec"]["containers"][0])
    assert in_set["SHOAL_HEAD"] == "tiny-node-0-0.tiny:29400"
    names = [e["name"] for e in container_of(ALL)["env"]]
    assert len(names) == len(set(names))


def test_the_container_unpacks_the_code_and_becomes_the_agent(tmp_path: Path) -> None:
    """The very script, run by a shell, with other folders in the place of the container's."""
    request = request_of(
        {"launch.setup": ["export GREETING=hello"], "launch.secrets": {"SALT": f"file:{tmp_path}/salt"}},
        {"code/mine.py": b"X = 1\n"},
    )
    for name in ("bundle", "code"):
        (tmp_path / name).mkdir()
    (tmp_path / "salt").write_text("pepper\n")
    (tmp_path / "bundle" / pod.TAR).write_bytes(request.bundle.tar())
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\necho "$PWD $PYTHONPATH $GREETING $SALT $*"\nexit 78\n')
    python.chmod(0o755)
    script = pod.script(request).replace("/shoal/", f"{tmp_path}/").replace("exec python3", f"exec {python}")
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True)
    code = f"{tmp_path}/code"
    asked = f"-m shoal.launch.agent {code}/run.yaml --workspace /data/space --processes 1 --min-nodes 1"
    assert (done.returncode, done.stdout) == (78, f"{code}/code {code}/code hello pepper {asked}\n"), done.stderr
    (tmp_path / "salt").unlink()
    assert subprocess.run(["/bin/sh", "-c", script], capture_output=True).returncode == 78


def test_the_pod_may_do_little() -> None:
    spec = job_of(RDMA)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert container_of()["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/shoal/code", "/tmp", "/dev/shm", "/data"}


def test_gpus_and_network_cards_are_asked_for_and_found() -> None:
    spec = job_of(RDMA)["spec"]["template"]["spec"]
    resources = spec["containers"][0]["resources"]
    devices = {"memory": "921600Mi", "nvidia.com/gpu": "8", "rdma/ib": "8"}
    assert resources == {"requests": {"cpu": "96", **devices}, "limits": devices}
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


def test_there_is_time_to_save_before_every_end() -> None:
    spec = job_of(ALL)["spec"]
    assert "activeDeadlineSeconds" not in spec  # it would fail the job for good
    grace_s = request_of().run.guard.grace_s
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == grace_s + 30
    assert spec["template"]["spec"]["activeDeadlineSeconds"] == 4 * 3600 - grace_s - 30


def test_only_what_prometheus_reads_is_open_to_others_and_only_when_asked() -> None:
    def reached(changes: dict[str, Any]) -> list[Any]:
        (policy,) = (d for d in documents(request_of(changes)) if d["kind"] == "NetworkPolicy")
        return [rule for rule in policy["spec"]["ingress"] if "from" not in rule]

    assert reached({}) == []
    assert reached({"launch.kubernetes.metrics": True}) == [{"ports": [{"protocol": "TCP", "port": 29401}]}]
    script = pod.script(request_of({"launch.kubernetes.metrics": True})).splitlines()
    serve = "(python3 -m shoal.observe.prometheus /data/space/runs/tiny --port 29401 &)"
    assert script[-2] == f'[ "$SHOAL_NODE" != 0 ] || {serve}'


def test_kueue_gets_its_labels_and_may_admit_a_part() -> None:
    job = job_of(VARIANTS["kueue elastic"])
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert job["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"
    assert "priorityClassName" not in job["spec"]["template"]["spec"]
    topology = job_of(VARIANTS["kueue"])["spec"]["template"]["metadata"]["annotations"]
    assert topology["kueue.x-k8s.io/podset-required-topology"] == "cloud.example/rack"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"launch.image": None}, "launch.image is empty"),
        ({"launch.kubernetes.kueue": True}, "launch.queue is empty"),
        ({"launch.queue": "team"}, "Kubernetes alone has no queues"),
        ({"launch.kubernetes.topology": "rack"}, "set launch.kubernetes.kueue"),
        ({**GPUS, "launch.kubernetes.gpu_resource": "habana.ai/gaudi"}, "use launch.kubernetes.node_selector"),
        ({**GPUS, "launch.gpu_type": "H100!"}, "cannot be the value of a node's label"),
        ({"launch.time_limit": "1 min"}, "leaves no time to train: 90 s of it are for saving"),
        ({"launch.workspace": "/elsewhere"}, "the workspace /elsewhere is in none of launch.volumes"),
        ({"launch.volumes": [{"at": "/data", "claim": "x", "read_only": True}]}, "is in none of launch.volumes"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)) as refused:
        Kubernetes().render(request_of(changes))
    assert str(refused.value).count(". ") == 0


def test_code_that_a_config_map_cannot_carry_is_refused() -> None:
    noise = random.Random(0).randbytes(1_000_000)
    with pytest.raises(UsageError, match="kB packed, and a Kubernetes ConfigMap carries 900 kB"):
        Kubernetes().render(request_of(files={"code/noise": noise}))


def test_a_secret_that_the_shell_does_not_have_is_missed_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no kubectl either
    with pytest.raises(ShoalError, match=r"\$MY_TOKEN is not set"):
        Kubernetes().submit(request_of(ALL))


@pytest.mark.parametrize(
    ("says", "resource"),
    [
        ({}, "nvidia.com/gpu"),
        ({"launch.gpu_type": "NVIDIA-H100-80GB-HBM3"}, "nvidia.com/gpu"),
        ({"launch.gpu_type": "AMD_Instinct_MI300X_OAM"}, "amd.com/gpu"),
        ({"launch.gpu_type": "a-label-of-ours"}, "nvidia.com/gpu"),
        ({"plan.on": "mi355x"}, "amd.com/gpu"),
        ({"plan.on": "mi355x", "launch.kubernetes.gpu_resource": "amd.com/cpx"}, "amd.com/cpx"),
    ],
)
def test_a_gpu_is_called_as_its_makers_plug_in_calls_it(says: dict[str, Any], resource: str) -> None:
    changes = {**GPUS, "launch.gpu_type": None, **says}
    container = container_of(changes)
    assert container["resources"]["limits"][resource] == str(GPUS["launch.gpus"])
    spec = job_of(changes)["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"key": resource, "operator": "Exists"}]
    if says.get("launch.gpu_type", "").startswith("AMD"):
        assert spec["nodeSelector"] == {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}
    worker = rayjob._worker(request_of(changes))
    assert worker["spec"]["containers"][0]["resources"]["limits"][resource] == str(GPUS["launch.gpus"])
