"""The chart on a real cluster: helm installs it, and its account can launch, look and stop, and no more."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from scripts.clusters import tools
from tests.clusters.kubernetes import IMAGE, Cluster, cluster
from tests.patience import Stopwatch
from tests.train.tiny import make_data, make_run

from shoal.launch.job import Job
from shoal.launch.kubernetes.backend import Kubernetes
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.send import request_of

pytestmark = [pytest.mark.cluster, pytest.mark.uses("kubernetes")]
CHART = Path(__file__).resolve().parents[2] / "deploy" / "chart" / "shoal"
SERVES = {"shoal.observe.prometheus", "/data/runs/tiny"}  # in its command line
READ = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:29401/metrics', timeout=5).read().decode())"


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Cluster]:
    with cluster("one") as made:
        yield made


@pytest.fixture(scope="module")
def chart(kubernetes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installed in namespace ml; a kubeconfig of its account."""
    install = [tools.folder() / "helm", "install", "shoal", CHART, "--namespace", "ml", "--create-namespace"]
    install += ["--kubeconfig", kubernetes.control_plane.kubeconfig, "--set", "claim.create=true"]
    subprocess.run([*install, "--set", "launch.kubernetes.metrics=true"], check=True, capture_output=True)
    token = kubernetes.kubectl("create", "token", "shoal-launcher", "-n", "ml").strip()
    config: Manifest = yaml.safe_load(kubernetes.control_plane.kubeconfig.read_text())
    config["users"] = [{"name": "admin", "user": {"token": token}}]
    file = tmp_path_factory.mktemp("launcher") / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture
def launcher(kubernetes: Cluster, chart: Path, monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
    """In a shell of the chart's account."""
    monkeypatch.setenv("PATH", kubernetes.environment["PATH"])
    monkeypatch.setenv("KUBECONFIG", str(chart))
    return Kubernetes()


def test_its_account_launches_a_run_that_prometheus_can_read(
    kubernetes: Cluster, launcher: Kubernetes, tmp_path: Path
) -> None:
    defaults = kubernetes.kubectl(
        "get", "configmap", "shoal-defaults", "-n", "ml", "-o", r"jsonpath={.data.launch\.yaml}"
    )
    section = {**yaml.safe_load(defaults)["launch"], "image": IMAGE, "gpus": 0}
    section["volumes"] = [{"at": "/data", "host": str(tmp_path)}]
    make_data(tmp_path / "tokens")
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o644)
    run = make_run(Path("/data/tokens"), launch=section, **{"train.steps": 100_000, "guard.grace_s": 5})
    job = launcher.submit(request_of(run, tmp_path))
    said = _await_metrics(launcher, job)
    assert float(said['shoal_steps_asked{run="tiny"}']) == 100_000
    assert launcher.states([job])[job.id].phase == "running"
    assert any("training tiny" in line for line in launcher.logs(job, follow=False, lines=None))
    launcher.stop(job, now=False)
    kubernetes.kubectl("wait", "--for=delete", "job/tiny", "-n", "ml", "--timeout=60s")
    assert launcher.states([job])[job.id].phase == "gone"
    left = kubernetes.kubectl("get", "configmap,secret,service,networkpolicy,pod", "-n", "ml", "-l", "shoal/job=tiny")
    assert "/tiny" not in left


def _await_metrics(launcher: Kubernetes, job: Job) -> dict[str, str]:
    """What the pod's metrics say once it has taken a step; asked from inside its network."""
    watch = Stopwatch()
    while watch.quiet_s() < 120:
        serving = [p.pid for p in psutil.process_iter(["cmdline"]) if set(p.info["cmdline"] or ()) >= SERVES]
        for pid in serving:
            enter = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", READ]
            lines = subprocess.run(enter, capture_output=True, text=True).stdout.splitlines()
            said = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
            if float(said.get('shoal_step{run="tiny"}', 0)) > 0:
                return said
        time.sleep(0.5)
    raise AssertionError(launcher.states([job])[job.id])


def test_its_account_can_do_no_more(kubernetes: Cluster, chart: Path) -> None:
    def may(verb: str, what: str, where: str) -> bool:
        who = "--as=system:serviceaccount:ml:shoal-launcher"
        try:
            return kubernetes.kubectl("auth", "can-i", verb, what, "-n", where, who).strip() == "yes"
        except RuntimeError:  # its exit code says no as well
            return False

    assert may("create", "jobs.batch", "ml")
    assert not may("get", "secrets", "ml")
    assert not may("create", "pods", "ml")
    assert not may("create", "jobs.batch", "default")
