"""The chart that a team installs once: helm takes it, Kubernetes would, and it hands out a launch section."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.clusters import tools
from tests.launch.schemas import validate
from tests.launch.test_kubernetes_manifests import request_of
from tests.require import unavailable

from shoal.launch.kubernetes import manifests
from shoal.observe import prometheus
from shoal.spec.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart" / "shoal"
ALL = [
    "launch.image=registry.example/shoal:0.1.0",
    "launchers[0].kind=Group",
    "launchers[0].name=ml-team",
    "launchers[1].kind=ServiceAccount",
    "launchers[1].name=ci",
    "trainerAccount.annotations.role=bucket-reader",
    "claim.create=true",
    "claim.storageClass=shared",
    "prometheus.podMonitor.create=true",
    "prometheus.rules.create=true",
    "prometheus.rules.labels.release=prometheus",
    "grafana.dashboard.create=true",
]
Documents = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def helm() -> Path:
    try:
        return tools.folder() / "helm"
    except (SystemExit, OSError, subprocess.CalledProcessError) as e:
        unavailable("helm", f"helm is not here and cannot be fetched: {e}")


def run(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True)


def template(helm: Path, *values: str) -> Documents:
    settings = [part for value in values for part in ("--set", value)]
    done = run(helm, "template", "team", str(CHART), "--namespace", "ml", *settings)
    assert done.returncode == 0, done.stderr
    found = [document for document in yaml.safe_load_all(done.stdout) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def test_helm_finds_nothing_to_complain_about(helm: Path) -> None:
    done = run(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = run(helm, "lint", "--strict", str(CHART), "--set", "prometheus.rules.idelFor=1h")
    assert "idelFor" in wrong.stdout + wrong.stderr
    assert wrong.returncode != 0


@pytest.mark.parametrize("values", [[], ALL, ["launcherAccount.create=false", "trainerAccount.create=false"]])
def test_what_it_installs_is_valid_and_in_its_namespace(helm: Path, values: list[str]) -> None:
    made = template(helm, *values)
    assert {document["metadata"]["namespace"] for document in made.values()} == {"ml"}
    for (kind, _), document in made.items():
        if kind not in ("PrometheusRule", "PodMonitor"):  # kinds of the Prometheus operator's
            validate(document)
    assert (("RoleBinding", "shoal-launcher") in made) == ("launcherAccount.create=false" not in values)


def test_the_role_never_reads_a_secret_nor_leaves_the_namespace(helm: Path) -> None:
    made = template(helm, *ALL)
    assert not [kind for kind, _ in made if kind.startswith("Cluster")]
    for rule in made["Role", "shoal-launcher"]["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert not set(rule["verbs"]) & {"get", "list", "watch"}
    subjects = [subject["name"] for subject in made["RoleBinding", "shoal-launcher"]["subjects"]]
    assert subjects == ["shoal-launcher", "ml-team", "ci"]


def test_the_defaults_are_a_launch_section(helm: Path) -> None:
    made = template(helm, *ALL, "launch.kubernetes.kueue=true", "launch.queue=team")
    section = yaml.safe_load(made["ConfigMap", "shoal-defaults"]["data"]["launch.yaml"])["launch"]
    launch = Launch.model_validate(section)
    assert (launch.on, launch.kubernetes.namespace, launch.kubernetes.kueue) == ("kubernetes", "ml", True)
    account = launch.kubernetes.service_account
    assert ("ServiceAccount", account) in made


def test_the_monitor_finds_what_a_run_serves(helm: Path) -> None:
    made = template(helm, *ALL)
    section = yaml.safe_load(made["ConfigMap", "shoal-defaults"]["data"]["launch.yaml"])["launch"]
    assert section["kubernetes"]["metrics"] is True
    job = manifests.job(request_of({"launch.kubernetes.metrics": True}), as_jobset=False)
    pod = job["spec"]["template"]
    (endpoint,) = made["PodMonitor", "shoal"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    wanted = made["PodMonitor", "shoal"]["spec"]["selector"]["matchLabels"]
    given = {**pod["metadata"]["labels"], "batch.kubernetes.io/job-completion-index": "0"}  # of the Job controller
    assert wanted.items() <= given.items()


def test_every_name_of_ours_in_alerts_and_panels_is_published(helm: Path) -> None:
    published = set(re.findall(r'Gauge\("(shoal_\w+)"', inspect.getsource(prometheus)))
    made = template(helm, *ALL)
    said = json.dumps([made["PrometheusRule", "shoal"], made["ConfigMap", "shoal-dashboard"]])
    used = set(re.findall(r"\bshoal_\w+", said))
    assert {"shoal_loss", "shoal_running"} <= used <= published


def test_alerts_name_runbooks_that_exist_and_the_dashboard_is_one(helm: Path) -> None:
    made = template(helm, *ALL)
    (group,) = made["PrometheusRule", "shoal"]["spec"]["groups"]
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert 'namespace="ml"' in rule["expr"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        for page in re.findall(r"docs/runbooks\S*\.md", rule["annotations"]["description"]):
            assert (ROOT / page).is_file(), page
    dashboard = json.loads(made["ConfigMap", "shoal-dashboard"]["data"]["shoal.json"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) == 10
