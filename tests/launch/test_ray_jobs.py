"""What Ray is sent and what its answers mean, without a cluster and without Ray."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.launch.schemas import validate

from shoal.errors import SpecError, UsageError
from shoal.launch.cores import SPARE, share
from shoal.launch.job import Job
from shoal.launch.ray.backend import Ray
from shoal.launch.ray.driver import request_in
from shoal.launch.ray.order import order, script
from shoal.launch.ray.places import bundle, of_machines, words
from shoal.launch.ray.states import states
from shoal.launch.ray.submission import TAR, job_id, package, package_name, submission
from shoal.launch.request import Request
from shoal.launch.send import request_of
from shoal.spec.run import Run

SECRETS = {"A": "env:MINE", "B": "file:/etc/it's key"}
ON_KUBERAY: dict[str, Any] = {
    "ray": {"address": "kuberay"},
    "image": "registry.example/shoal-ray:0.1.0",
    "workspace": "/data/work",
    "volumes": [{"at": "/data", "claim": "shared"}],
}


def asked(tmp_path: Path, **launch: Any) -> Request:
    data = {"train": str(tmp_path / "data")}
    launch = {"on": "ray", **launch}
    run = Run.model_validate({"name": "demo", "data": data, "train": {"steps": 20}, "launch": launch})
    return request_of(run, tmp_path)


def test_what_is_rendered_is_what_is_sent_and_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "hunter2")
    request = asked(tmp_path, secrets=SECRETS, env={"NCCL_DEBUG": "WARN"}, setup=["module load cuda"], queue="gpu")
    (rendered,) = Ray().render(request)
    assert yaml.safe_load(rendered.text) == submission(request)
    assert rendered.text.startswith(
        "# POST /api/jobs/\n# not used, since the Ray cluster is there already: launch.queue"
    )
    assert "hunter2" not in rendered.text
    assert request.token not in rendered.text
    body = submission(request)
    assert body["submission_id"] == job_id(request) != job_id(asked(tmp_path))
    assert body["runtime_env"]["working_dir"] == f"gcs://{package_name(request)}"
    # Ray would kill the driver after 3 s; it has the run's own grace and what lies between them.
    grace = request.run.guard.grace_s
    assert int(body["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= grace + 60
    assert body["entrypoint"].startswith("exec bash -c '{ module load cuda")


def test_the_driver_finds_in_the_package_what_was_asked_for(tmp_path: Path) -> None:
    code = tmp_path / "mine"
    code.mkdir()
    (code / "model.py").write_text("x = 1\n")
    request = asked(tmp_path, code=str(code), nodes=4, min_nodes=2)
    assert package(request) == package(request)
    with zipfile.ZipFile(io.BytesIO(package(request))) as whole:
        (tmp_path / TAR).write_bytes(whole.read(TAR))
    found = request_in(tmp_path / TAR, "/on/the/nodes", "python3.11")
    assert found.bundle == request.bundle
    assert (found.there, found.python, found.least_nodes) == ("/on/the/nodes", "python3.11", 2)
    assert found.run.train == request.run.train


def test_an_agent_gets_its_place_the_secrets_and_the_code(tmp_path: Path) -> None:
    code = tmp_path / "mine"
    code.mkdir()
    (code / "model.py").write_text("x = 1\n")
    request = asked(tmp_path, nodes=2, secrets=SECRETS, env={"A": "plain", "C": "3"}, code=str(code))
    told = order(request, {"A": "hunter2", "SHOAL_TOKEN": "00"}, "job-1", 1, ("10.0.0.7", 20123))
    assert told["env"]["A"] == "hunter2"
    about = {k: v for k, v in told["env"].items() if k.startswith("SHOAL_")}
    assert about == {
        "SHOAL_NODE": "1", "SHOAL_NODES": "2", "SHOAL_HEAD": "10.0.0.7:20123", "SHOAL_JOB": "job-1", "SHOAL_TOKEN": "00"
    }  # fmt: skip
    text = script(request, told["code"])
    assert "hunter2" not in text
    assert "B=\"$(cat '/etc/it'\"'\"'s key')\" || exit 78; export B" in text
    assert f"cd {told['code']}/code" in text
    assert 'shoal.guard.tied "$PPID"' in text


def test_what_a_node_needs_in_rays_words(tmp_path: Path) -> None:
    request = asked(tmp_path, gpus=8, gpu_type="H100", memory_gb=64, cpus=16, ray={"resources": {"rack": 0.5}})
    needs = bundle(request)
    assert needs == {"CPU": 16, "GPU": 8, "accelerator_type:H100": 0.001, "memory": 64 * 2**30, "rack": 0.5}
    assert words(needs) == "16 CPU, 8 GPU, H100, 64 GB memory and 0.5 rack"
    assert words({"CPU": 1}) == "1 CPU"


def test_what_cannot_be_is_refused_before_anything_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"launch\.secrets\.K is kubernetes:store/key.*for a Ray cluster name"):
        Ray().render(asked(tmp_path, secrets={"K": "kubernetes:store/key"}))
    with pytest.raises(SpecError, match=r"launch\.time_limit 1 min leaves no time to train"):
        Ray().render(asked(tmp_path, time_limit="1 min"))
    with pytest.raises(UsageError, match=r"\$MINE is not set"):
        Ray().submit(asked(tmp_path, secrets={"A": "env:MINE"}))
    with pytest.raises(UsageError, match="kuberay, which is rendered and not sent"):
        Ray().submit(asked(tmp_path, **ON_KUBERAY))
    with pytest.raises(SpecError, match=r"a manifest holds no secrets.*kubernetes:SECRET/KEY"):
        Ray().render(asked(tmp_path, **ON_KUBERAY, secrets={"A": "env:MINE"}))
    with pytest.raises(SpecError, match=r"launch\.image is empty"):
        Ray().render(asked(tmp_path, **{**ON_KUBERAY, "image": None}))


def test_a_rayjob_is_valid_and_holds_references_only(tmp_path: Path) -> None:
    request = asked(
        tmp_path, **ON_KUBERAY, nodes=4, min_nodes=2, gpus=8, gpu_type="NVIDIA-H100", queue="team",
        env={"X": "$(HOME)"}, secrets={"KEY": "kubernetes:store/key"},
        kubernetes={"kueue": True, "rdma": {"rdma/ib": 8}},
    )  # fmt: skip
    (rendered,) = Ray().render(request)
    config, job = yaml.safe_load_all(rendered.text)
    validate(config)
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"], spec["suspend"]) == (0, True, True)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (4, 2, 4)
    head = spec["rayClusterSpec"]["headGroupSpec"]
    for group in (head, workers):
        validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]})
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/ib": "8"}
    assert {"name": "X", "value": "$$(HOME)"} in container["env"]
    reference = {"secretKeyRef": {"name": "store", "key": "key"}}
    assert {"name": "KEY", "valueFrom": reference} in container["env"]
    assert workers["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100"}
    assert bundle(request) == {"CPU": 8, "GPU": 8}  # the type is a label of the machines there
    assert request.token not in rendered.text
    assert spec["entrypoint"] == "exec bash /shoal/bundle/driver.sh"
    driver = f"exec python3 -m shoal.launch.ray.driver /shoal/bundle/{TAR} --job default/demo --workspace /data/work"
    assert config["data"]["driver.sh"].startswith(driver)
    assert config["binaryData"].keys() == {TAR}


def test_a_thousand_nodes_are_rendered_at_once(tmp_path: Path) -> None:
    request = asked(tmp_path, **ON_KUBERAY, nodes=1000, gpus=8)
    assert "replicas: 1000" in Ray().render(request)[0].text
    assert Ray().render(asked(tmp_path, nodes=1000, gpus=8))


def said(status: str, code: int | None = None, message: str = "", entrypoint: str = "exec python -m x") -> Any:
    return SimpleNamespace(
        status=SimpleNamespace(value=status), driver_exit_code=code, message=message, entrypoint=entrypoint,
        start_time=1_000, end_time=None,
    )  # fmt: skip


def test_rays_words_become_ours() -> None:
    log = "last available logs (truncated to 20,000 chars):\nshoal: node 0 is on n1.\n[0] shoal: no data in /x.\n\n"
    answers = {
        "new": said("PENDING"),
        "held": said("RUNNING"),
        "busy": said("RUNNING"),
        "hurt": said("RUNNING"),
        "done": said("SUCCEEDED", 0),
        "told": said("STOPPED"),
        "saved": said("FAILED", 143),
        "wrong": said("FAILED", 78, f"Job entrypoint command failed with exit code 78, {log}"),
        "silent": said("FAILED", 1, "Job entrypoint command failed with exit code 1. No logs available."),
        "python": said("FAILED", 127, "sh: 1: exec: /opt/py: not found", "exec /opt/py -m shoal.launch.ray.driver"),
        "lost": said("FAILED", None, "Job supervisor actor died:\n  its node was lost."),
    }
    jobs = [Job("run", "ray", name, 0.0, 2, 8, "/w", "00", {"address": "x"}) for name in [*answers, "never"]]
    found = states(jobs, answers, {"shoal held": "PENDING", "shoal busy": "CREATED", "shoal hurt": "RESCHEDULING"})
    assert {name: (state.phase, state.why) for name, state in found.items()} == {
        "new": ("waiting", "Ray starts its driver"),
        "held": ("waiting", "the Ray cluster does not have 2 free nodes with 8 GPUs each"),
        "busy": ("running", "its driver runs on the Ray cluster"),
        "hurt": ("running", "it has lost a machine, and the Ray cluster has no other for it yet"),
        "done": ("done", "all steps are done"),
        "told": ("stopped", "it was told to stop"),
        "saved": ("stopped", "its driver was told to stop"),
        "wrong": ("failed", "exit code 78: no data in /x"),
        "silent": ("failed", "exit code 1: Job entrypoint command failed with exit code 1. No logs available"),
        "python": (
            "failed",
            "/opt/py cannot be run on Ray's head; set launch.python to the Python there that has Shoal",
        ),
        "lost": ("failed", "Job supervisor actor died: its node was lost"),
        "never": ("gone", "the Ray cluster knows nothing of job never; its head was started anew since"),
    }
    assert found["wrong"].exit_code == 78
    assert found["busy"].started == 1.0


def test_cores_go_with_the_gpus_as_rays_machines_have_them() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 96.0, "GPU": 8.0, "accelerator_type:H100": 1.0}},
        {"Alive": True, "Resources": {"CPU": 128.0, "GPU": 8.0, "accelerator_type:A100": 1.0}},
        {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 16.0}},
    ]
    assert share(of_machines(nodes, None), 8, SPARE) == 84
    assert share(of_machines(nodes, "A100"), 4, SPARE) == 56
    assert share(of_machines(nodes, "H200"), 1, SPARE) is None
