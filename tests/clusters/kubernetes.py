"""A whole cluster for a test: a real control plane, a network, and nodes that run what they are given."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from scripts.clusters import tools
from scripts.clusters.kubernetes import programs
from tests.clusters.api import Api, Object
from tests.clusters.certificates import self_signed
from tests.clusters.control_plane import ControlPlane
from tests.patience import limit
from tests.require import unavailable

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "shoal.test/shoal:test"


class Cluster:
    def __init__(self, folder: Path, lost_after_s: int) -> None:
        self.folder = folder
        self.control_plane = ControlPlane(folder / "control-plane", lost_after_s)
        self.kubelets: dict[str, subprocess.Popen[bytes]] = {}
        self._network: subprocess.Popen[bytes] | None = None
        self._where: Object = {}
        self._nodes = 0

    @property
    def api(self) -> Api:
        return self.control_plane.api()

    @property
    def environment(self) -> dict[str, str]:
        """What a user has in the shell: the kubeconfig, and kubectl on the PATH."""
        return {"KUBECONFIG": str(self.control_plane.kubeconfig), "PATH": f"{tools.folder()}:{os.environ['PATH']}"}

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        command = [str(tools.folder() / "kubectl"), "--kubeconfig", str(self.control_plane.kubeconfig), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=limit(120))
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def start(self) -> None:
        self.control_plane.start()
        plane = self.control_plane
        self._where = {"url": plane.url, "ca": str(plane.ca), "token": plane.token}
        config = self.folder / "network.json"
        config.write_text(json.dumps(self._where))
        self._network, said = self._run("tests.clusters.network", config)
        self._where |= json.loads(said)

    def add_node(self, name: str, gpus: int = 0, cpus: int = 8, labels: dict[str, str] | None = None) -> None:
        """A node whose pods run as processes of this machine."""
        self._nodes += 1
        folder = self.folder / name
        folder.mkdir()
        self_signed(folder / "tls.crt", folder / "tls.key")
        capacity = {"cpu": str(cpus), "memory": "64Gi", "ephemeral-storage": "100Gi"}
        capacity |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
        binary = Path(sys.executable).parent
        config = {
            **self._where,
            "node": name,
            "index": self._nodes,
            "capacity": capacity,
            "labels": labels or {},
            "folder": str(folder),
            "certificate": str(folder / "tls.crt"),
            "key": str(folder / "tls.key"),
            "images": [r"shoal\.test/.*"],
            "image_env": {"PATH": f"{binary}:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
            "passable": _passable(binary),
            "installed": sorted({str(ROOT), str(binary.parent)}),
        }
        file = folder / "kubelet.json"
        file.write_text(json.dumps(config))
        self.kubelets[name], _ = self._run("tests.clusters.kubelet", file)

    def start_jobset(self) -> None:
        with _built():
            self.control_plane.start_jobset()

    def start_kueue(self) -> None:
        with _built():
            self.control_plane.start_kueue()

    def lose_node(self, name: str) -> None:
        """The machine is gone: its kubelet and all that it ran."""
        process = self.kubelets.pop(name)
        process.kill()
        process.wait(limit(10))

    def kill(self, pod: Object) -> None:
        """-9 for all its processes, as when the memory is out. Whoever watches over it learns of it by its end."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                said = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if any(f"/pods/{pod['metadata']['uid']}/" in word for word in said) and "container.py" in said[1]:
                    os.kill(int(process.name), signal.SIGKILL)

    def add_fake_nodes(self, count: int, gpus: int) -> None:
        """Nodes that the scheduler sees and where nothing runs."""
        capacity = {"cpu": "192", "memory": "2Ti", "pods": "110", "nvidia.com/gpu": str(gpus)}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        api = self.api

        def create(i: int) -> None:
            labels = {"kubernetes.io/hostname": f"fake-{i}", "shoal.test/fake": "true"}
            status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
            api.create("/api/v1/nodes", {"metadata": {"name": f"fake-{i}", "labels": labels}, "status": status})

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(create, range(count)))

    @contextmanager
    def namespace(self, prefix: str = "team") -> Iterator[str]:
        """One of its own, with its service account; all in it is deleted at the end, though nobody waits for that."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        self.api.until(f"/api/v1/namespaces/{name}/serviceaccounts/default", lambda _: True)
        try:
            yield name
        finally:
            self.api.delete(f"/api/v1/namespaces/{name}")

    def stop(self) -> None:
        for process in [*self.kubelets.values(), *([self._network] if self._network else [])]:
            process.kill()
            process.wait(limit(10))
        self.control_plane.stop()

    def _run(self, module: str, config: Path) -> tuple[subprocess.Popen[bytes], str]:
        with open(config.with_suffix(".log"), "ab") as log:
            command = [sys.executable, "-m", module, str(config)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)
        assert process.stdout is not None
        said = process.stdout.readline().decode()
        if not said:
            raise RuntimeError(f"{module} did not start:\n{config.with_suffix('.log').read_text()[-3000:]}")
        return process, said


@contextmanager
def _built() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as e:
        unavailable("kubernetes", str(e))


def _passable(binary: Path) -> list[str]:
    """Folders above Python and the checkout that only root may enter: in an image they would not be such."""
    above = {*binary.resolve().parents, *Path(sys.executable).resolve().parents, *ROOT.parents}
    return sorted(str(folder) for folder in above if folder.stat().st_mode & 0o005 != 0o005)


@contextmanager
def cluster(*nodes: str, gpus: int = 0, lost_after_s: int = 60) -> Iterator[Cluster]:
    """Started when entered, with these nodes; nothing of it is left."""
    if os.geteuid() != 0:
        unavailable("kubernetes", "the test kubelet runs containers, for which it must be root")
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        unavailable("kubernetes", "ip (iproute2) or nsenter (util-linux) is not here: the pods' network needs them")
    with _built():
        programs()
    folder = Path(tempfile.mkdtemp(prefix="shoal-kubernetes-"))
    made = Cluster(folder / "c", lost_after_s)
    try:
        made.start()
        for node in nodes:
            made.add_node(node, gpus)
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)
