"""A run remembers the code, the environment and the seed, and nothing secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import __version__
from shoal.spec import Run
from shoal.spec.identity import git_state, identity
from tests.patience import limit

RUN = Run(name="a", seed=7, data={"train": "x"}, train={"steps": 1})


def git(folder: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=limit(30), env={**os.environ, **who}
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_commit_and_whether_it_was_changed_are_remembered(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
    (repository / "run.yaml").write_text("name: a\n")  # not tracked, so no change of the code
    assert git_state(repository) == {"commit": commit, "dirty": False}
    (repository / "code.py").write_text("2\n")
    assert git_state(repository) == {"commit": commit, "dirty": True}


def test_outside_a_repository_or_before_the_first_commit_there_is_no_commit(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None


def test_without_git_there_is_no_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_state(repository) is None


def test_identity_is_json_with_versions_seed_and_command(tmp_path: Path) -> None:
    found = json.loads(json.dumps(identity(RUN, argv=["shoal", "train", "run.yaml"], folder=tmp_path)))
    assert found["shoal"] == __version__
    assert found["seed"] == 7
    assert found["python"] == sys.version.split()[0]
    assert found["packages"]["torch"].startswith("2.")
    assert found["argv"] == ["shoal", "train", "run.yaml"]
    assert found["git"] is None
    assert found["cpus"] >= 1


def test_no_secret_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "from-the-environment")
    text = json.dumps(identity(RUN, argv=["shoal", "track.mlflow=https://me:hunter2@host/x"]))
    assert "hunter2" not in text
    assert "from-the-environment" not in text
    assert "host/x" in text


def test_the_spec_and_identity_do_not_import_torch() -> None:
    code = (
        "import sys, shoal.spec.identity, shoal.decide.checks, shoal.spec.reference, shoal.cli.init, shoal.cli.show\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=limit(60))
    assert done.stdout.strip() == "[]"
