"""The chart on a real API server: helm installs it, and with its account one can launch, look and stop, and no more."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from scripts.clusters import tools
from tests.clusters.kubernetes import IMAGE, Cluster, cluster
from tests.train.tiny import make_run

from shoal.launch.kubernetes.backend import Kubernetes
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.send import request_of

pytestmark = pytest.mark.cluster
CHART = Path(__file__).resolve().parents[2] / "deploy" / "chart" / "shoal"


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Cluster]:
    with cluster() as made:  # no nodes: what is launched waits
        yield made


@pytest.fixture
def launcher(kubernetes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A shell of the chart's account; the namespace."""
    for name, value in kubernetes.environment.items():
        monkeypatch.setenv(name, value)
    install = [tools.folder() / "helm", "install", "shoal", CHART, "--namespace", "ml", "--create-namespace"]
    subprocess.run([*install, "--set", "claim.create=true"], check=True, capture_output=True)
    token = kubernetes.kubectl("create", "token", "shoal-launcher", "-n", "ml").strip()
    config: Manifest = yaml.safe_load(kubernetes.control_plane.kubeconfig.read_text())
    config["users"] = [{"name": "admin", "user": {"token": token}}]
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return "ml"


def test_its_account_can_launch_look_and_stop_and_no_more(kubernetes: Cluster, launcher: str, tmp_path: Path) -> None:
    defaults = kubernetes.kubectl(
        "get", "configmap", "shoal-defaults", "-n", launcher, "-o", r"jsonpath={.data.launch\.yaml}"
    )
    section = {**yaml.safe_load(defaults)["launch"], "image": IMAGE, "gpus": 0}
    run = make_run(Path("/data/tokens"), launch=section)
    backend = Kubernetes()
    job = backend.submit(request_of(run, tmp_path))
    assert "waiting" in {backend.states([job])[job.id].phase for _ in range(3)}
    assert list(backend.logs(job, follow=False, lines=None)) == []
    owned = kubernetes.kubectl("get", "configmap,secret,service,networkpolicy", "-n", launcher, "-l", "shoal/job=tiny")
    assert owned.count("/tiny ") == 4
    backend.stop(job, now=True)
    kubernetes.kubectl("wait", "--for=delete", "job/tiny", "-n", launcher, "--timeout=60s")
    assert backend.states([job])[job.id].phase == "gone"
    left = kubernetes.kubectl("get", "configmap,secret,service,pod", "-n", launcher, "-l", "shoal/job=tiny")
    assert "/tiny" not in left

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
