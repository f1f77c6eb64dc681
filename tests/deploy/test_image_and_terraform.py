"""The Dockerfile and the Terraform example, as far as they can be judged without a cloud."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.require import unavailable

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
EKS = ROOT / "deploy" / "terraform" / "aws-eks"


def test_the_dockerfile_is_clean() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([beside, "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_does_not_run_as_root_and_holds_only_what_it_needs() -> None:
    text = DOCKERFILE.read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000:1000"]  # what launch.kubernetes.user is by default
    sent = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for name in line.split()[:-1]}
    assert {f"!{name}" for name in copied} <= set(sent)
    assert "*" in sent
    assert all((ROOT / name).exists() for name in copied)
    assert f"uv=={re.search(r'uv==([0-9.]+)', (ROOT / 'Makefile').read_text())[1]}" in text  # type: ignore[index]


def test_the_image_has_what_nccl_needs_to_use_rdma() -> None:
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1", "libnuma1"} <= set(DOCKERFILE.read_text().split())


@pytest.fixture(scope="module")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example in which `terraform init` has run."""
    if shutil.which("terraform") is None:
        unavailable("terraform", "terraform is not installed, so that deploy/terraform is not validated")
    folder = tmp_path_factory.mktemp("terraform") / "aws-eks"
    shutil.copytree(EKS, folder, ignore=shutil.ignore_patterns(".terraform*"))
    # A provider that is kept on this machine (`terraform providers mirror`); else it is fetched.
    kept = os.environ.get("SHOAL_TERRAFORM_PLUGINS") or next(
        (str(found.parents[2]) for found in Path("/opt").glob("*/registry.terraform.io/hashicorp/aws")), None
    )
    plugins = [f"-plugin-dir={kept}"] if kept else []
    done = run(folder, "init", "-backend=false", "-input=false", *plugins)
    if done.returncode:
        unavailable("terraform", f"terraform has no AWS provider here: {done.stderr[-300:]}")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1", "TF_CLI_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["terraform", *arguments, "-no-color"], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow  # the provider's schemas are 700 MB of program
def test_the_example_of_a_gpu_cluster_is_valid(terraform: Path) -> None:
    done = run(terraform, "validate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run(terraform, "fmt", "-check").returncode == 0


def test_every_variable_says_what_it_is_for() -> None:
    variables = re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', (EKS / "variables.tf").read_text(), re.M | re.S)
    assert len(variables) > 5
    for name, body in variables:
        assert re.search(r'^  description = "[A-Z]', body, re.M), name
        used = sum(file.read_text().count(f"var.{name}") for file in EKS.glob("*.tf"))
        assert used > body.count(f"var.{name}"), f"{name} is used nowhere"
