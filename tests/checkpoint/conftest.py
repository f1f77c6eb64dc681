"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.require import unavailable
from tests.services import S3Server, s3_server


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        unavailable("mount", f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def s3_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all tests that leave it running; a prefix for each of them is `s3`."""
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        server.make_bucket("checkpoints")
        yield server


@pytest.fixture
def s3(s3_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty place in a bucket, with the keys for it in the environment."""
    for name, value in s3_session.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://checkpoints/{uuid4().hex}"
