"""Where Shoal's runs on the test cluster keep their files, and what the tests of them ask again and again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.api import Api, Object
from tests.clusters.kubernetes import IMAGE, Cluster
from tests.patience import Stopwatch, limit
from tests.train.tiny import digest_of, make_data, make_run, train_on

from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.launch.backend import OVER, State
from shoal.launch.job import Job
from shoal.launch.kubernetes import names
from shoal.launch.kubernetes.backend import Kubernetes
from shoal.launch.request import Request
from shoal.launch.send import request_of

STEPS = 120
AT = "/workspace"  # in the pods
CLAIM = "runs"
USER = 1000
SLOWLY = """\
import os, time
from shoal.journal.journal import Journal

plain = Journal.append

def append(self, kind, **fields):
    if kind == "step":
        time.sleep(float(os.environ.get("PACE", "0")))
    return plain(self, kind, **fields)

Journal.append = append
"""


@dataclass
class Place:
    """A namespace that allows only restricted pods, with a volume that all nodes see, data on it, and code that
    travels with a run: it makes a step take as long as a test needs."""

    cluster: Cluster
    namespace: str
    folder: Path
    backend: Kubernetes

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def api(self) -> Api:
        return self.cluster.api

    def request(self, name: str, pace_s: float = 0.05, **changes: Any) -> Request:
        spec = {
            "name": name, "train.steps": STEPS, "checkpoint.every": 30, "guard.grace_s": 5, "launch.on": "kubernetes",
            "launch.nodes": 2, "launch.image": IMAGE, "launch.workspace": AT,
            "launch.volumes": [{"at": AT, "claim": CLAIM}], "launch.code": str(self.folder / "code"),
            "launch.env": {"PACE": str(pace_s)}, "launch.kubernetes.namespace": self.namespace,
            "launch.kubernetes.shm_gb": 0.25, "launch.kubernetes.user": USER, "launch.kubernetes.jobset": False,
        }  # fmt: skip
        return request_of(make_run(Path(AT) / "data", **spec | changes), self.folder / "here")

    def submit(self, name: str, pace_s: float = 0.05, **changes: Any) -> Job:
        return self.backend.submit(self.request(name, pace_s, **changes))

    def shoal(self, *arguments: str) -> str:
        """The command, as a person types it here, where the run directories of the nodes are out of sight."""
        command = [sys.executable, "-m", "shoal", *arguments, "--workspace", str(self.folder / "here")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit(200))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self, job: Job) -> State:
        return self.backend.states([job])[job.id]

    def run_dir(self, job: Job) -> RunDir:
        return RunDir.of(job.run, self.shared)

    def digest(self, job: Job) -> str:
        return digest_of(self.run_dir(job))

    def log(self, job: Job) -> str:
        return "\n".join(self.backend.logs(job, follow=False, lines=None))

    def kinds(self, job: Job, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir(job).journal_file
        return [r for r in records(path) if r["kind"] == kind] if path.exists() else []

    def pods(self, job: Job) -> list[Object]:
        """Those that run now, by their index."""
        name = job.id.rpartition("/")[2]
        found = self.api.items(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=f"{names.JOB}={name}")
        alive = [p for p in found if p["status"]["phase"] == "Running" and "deletionTimestamp" not in p["metadata"]]
        return sorted(
            alive, key=lambda p: str(p["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])
        )

    def until(self, job: Job, holds: Callable[[State], bool], timeout_s: float = 120) -> State:
        watch = Stopwatch()
        while not holds(state := self.state(job)):
            assert watch.quiet_s() < timeout_s, f"{state}\n{self.log(job)}"
            time.sleep(0.3)
        return state

    def trains(self, job: Job, step: int, attempt: int = 0, timeout_s: float = 120) -> None:
        """Until it has come so far."""
        watch = Stopwatch()
        while not any(r["step"] >= step and r["attempt"] >= attempt for r in self.kinds(job, "step")):
            assert watch.quiet_s() < timeout_s, f"{self.state(job)}\n{self.log(job)}"
            time.sleep(0.1)

    def ends(self, job: Job, timeout_s: float = 150) -> State:
        return self.until(job, lambda state: state.phase in OVER, timeout_s)

    def undisturbed(self) -> str:
        """The digest of the same run on two processes of this machine, with no launcher."""
        run = make_run(self.shared / "data", **{"train.steps": STEPS})
        return digest_of(train_on(run, self.folder / "local", 2))


@contextmanager
def place(cluster: Cluster, folder: Path) -> Iterator[Place]:
    made = Place(cluster, "research", folder, Kubernetes())
    make_data(made.shared / "data")
    (folder / "code").mkdir()
    (folder / "here").mkdir()
    (folder / "code" / "sitecustomize.py").write_text(SLOWLY)
    strict = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": made.namespace, "labels": strict}})
    cluster.api.until(f"/api/v1/namespaces/{made.namespace}/serviceaccounts/default", lambda _: True)
    _claim(cluster.api, made)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield made


def _claim(api: Api, place: Place) -> None:
    size, modes = {"storage": "10Gi"}, ["ReadWriteMany"]
    volume = {
        "capacity": size,
        "accessModes": modes,
        "storageClassName": "shared",
        "hostPath": {"path": str(place.shared)},
    }
    api.create("/api/v1/persistentvolumes", {"metadata": {"name": CLAIM}, "spec": volume})
    asked = {"accessModes": modes, "storageClassName": "shared", "resources": {"requests": size}}
    claims = f"/api/v1/namespaces/{place.namespace}/persistentvolumeclaims"
    api.create(claims, {"metadata": {"name": CLAIM}, "spec": asked})
    api.until(f"{claims}/{CLAIM}", lambda claim: claim["status"].get("phase") == "Bound")
