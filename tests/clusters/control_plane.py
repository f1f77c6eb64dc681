"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler as processes of this one, on ports of their own.

Also the controllers of JobSet and Kueue, each with its webhooks, for which a certificate is made.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from scripts.clusters.kubernetes import JOBSET, KUEUE, Part, built, programs
from tests.clusters.api import Api, ApiError, Object, condition
from tests.clusters.certificates import key_pair, self_signed
from tests.patience import Stopwatch, limit
from tests.services import free_ports

READY_S = 60.0


class ControlPlane:
    """Ready when `start` returns. The kernel ends its processes with the thread that called it."""

    def __init__(self, folder: Path, lost_after_s: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._lost_after_s = lost_after_s  # a node that says nothing
        etcd, peer, api = free_ports(3)
        self._etcd = f"http://127.0.0.1:{etcd}"
        self._peer = f"http://127.0.0.1:{peer}"
        self._port = api
        self.url = f"https://127.0.0.1:{api}"
        self.token = secrets.token_hex(16)
        self.ca = folder / "apiserver.crt"
        self.kubeconfig = folder / "kubeconfig"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        at = programs()
        self._write_files()
        try:
            self._run(
                "etcd", [
                    at / "etcd", f"--data-dir={self.folder / 'etcd'}", f"--listen-client-urls={self._etcd}",
                    f"--advertise-client-urls={self._etcd}", f"--listen-peer-urls={self._peer}",
                    f"--initial-advertise-peer-urls={self._peer}", f"--initial-cluster=default={self._peer}",
                    "--unsafe-no-fsync", "--log-level=warn",
                ],
            )  # fmt: skip
            key = self.folder / "accounts.key"
            self._run(
                "kube-apiserver", [
                    at / "kube-apiserver", f"--etcd-servers={self._etcd}", "--bind-address=127.0.0.1",
                    f"--secure-port={self._port}", f"--tls-cert-file={self.ca}",
                    f"--tls-private-key-file={self.folder / 'apiserver.key'}",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}",
                    f"--token-auth-file={self.folder / 'tokens.csv'}", "--authorization-mode=Node,RBAC",
                    "--service-cluster-ip-range=10.0.0.0/24", "--kubelet-preferred-address-types=InternalIP",
                    # A node that stops is lost after seconds, not minutes: the pods on it need not wait for it.
                    "--default-not-ready-toleration-seconds=2", "--default-unreachable-toleration-seconds=2",
                ],
            )  # fmt: skip
            self._await("kube-apiserver", self._answers)
            # As fast as they can: a cluster of thousands of nodes would be told the same.
            hurry = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--secure-port=0"]
            hurry += ["--kube-api-qps=2000", "--kube-api-burst=4000"]
            self._run(
                "kube-controller-manager", [
                    at / "kube-controller-manager", *hurry, f"--service-account-private-key-file={key}",
                    f"--root-ca-file={self.ca}", "--use-service-account-credentials=true", "--controllers=*",
                    "--node-monitor-period=1s", f"--node-monitor-grace-period={self._lost_after_s}s",
                    "--concurrent-job-syncs=10",
                ],
            )  # fmt: skip
            self._run("kube-scheduler", [at / "kube-scheduler", *hurry])
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            self._await("kube-controller-manager", lambda: bool(self.api().get(account)))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """kill -9, all of them: their data is thrown away."""
        for process in reversed(self._processes.values()):
            process.kill()
        for process in self._processes.values():
            process.wait(limit(10))
        self._processes.clear()

    def api(self) -> Api:
        return Api(self.url, self.ca, self.token)

    def kill(self, program: str) -> None:
        """The others have to do without it."""
        process = self._processes.pop(program)
        process.send_signal(signal.SIGKILL)
        process.wait(limit(10))

    def start_jobset(self) -> None:
        health, hooks = free_ports(2)
        configuration = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            **self._serving("jobset", health, hooks),
        }
        self._start_controller(JOBSET, "jobset", configuration, health, hooks)

    def start_kueue(self) -> None:
        health, hooks = free_ports(2)
        configuration = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
            "featureGates": {"VisibilityOnDemand": False},  # a second API server, with certificates of its own
            **self._serving("kueue", health, hooks),
        }
        self._start_controller(KUEUE, "kueue", configuration, health, hooks)

    def _serving(self, name: str, health: int, hooks: int) -> Object:
        return {
            "webhook": {"port": hooks, "host": "127.0.0.1", "certDir": str(self.folder / name)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        }

    def _start_controller(self, part: Part, name: str, configuration: Object, health: int, hooks: int) -> None:
        at = built(part)
        certificates = self.folder / name
        certificates.mkdir()
        certificate = self_signed(certificates / "tls.crt", certificates / "tls.key")
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(configuration))
        api = self.api()
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        names = []
        for manifest in sorted(at.glob("bases-*.yaml")):
            definition = yaml.safe_load(manifest.read_text())
            names.append(api.create(definitions, definition)["metadata"]["name"])
        for defined in names:
            api.until(f"{definitions}/{defined}", lambda d: condition(d, "Established") is not None)
        command: list[str | Path] = [at / name, f"--config={file}", "--zap-log-level=info"]
        if part is KUEUE:
            command = _with_metrics_certificate(command, certificates)
        self._run(name, command, KUBECONFIG=str(self.kubeconfig), POD_NAMESPACE="kube-system")
        self._await(name, lambda: _healthy(health))
        for webhooks in yaml.safe_load_all((at / "webhook-manifests.yaml").read_text()):
            self._admit(api, name, webhooks, hooks, certificate)

    def _admit(self, api: Api, name: str, webhooks: Object, port: int, certificate: bytes) -> None:
        """The webhooks as the project publishes them, but for where they are: here, without a Service."""
        served = {"batch", "jobset.x-k8s.io", "kueue.x-k8s.io"} | ({""} if name == "jobset" else set())
        kept = []
        for webhook in webhooks["webhooks"]:
            if all(set(rule["apiGroups"]) <= served for rule in webhook["rules"]):
                path = webhook["clientConfig"]["service"]["path"]
                bundle = base64.b64encode(certificate).decode()
                webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
                kept.append(webhook)
        webhooks["webhooks"] = kept
        webhooks["metadata"]["name"] = f"{name}-{webhooks['metadata']['name']}"
        plural = f"{webhooks['kind'].lower()}s"
        api.create(f"/apis/admissionregistration.k8s.io/v1/{plural}", webhooks)

    def _write_files(self) -> None:
        self_signed(self.ca, self.folder / "apiserver.key")
        key_pair(self.folder / "accounts.key")
        (self.folder / "tokens.csv").write_text(f'{self.token},admin,admin,"system:masters"\n')
        named = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(yaml.safe_dump(named))
        self.kubeconfig.chmod(0o600)

    def _run(self, name: str, command: list[str | Path], **environment: str) -> None:
        tied = [sys.executable, "-m", "shoal.guard.tied", str(os.getpid()), *map(str, command)]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                tied, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder, env=os.environ | environment
            )

    def _answers(self) -> bool:
        return self.api().text("/readyz") == "ok"

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        watch = Stopwatch()
        why = "it was not ready in time"
        while self._processes[name].poll() is None and watch.quiet_s() < READY_S:
            try:
                if ready():
                    return
            except (OSError, ssl.SSLError, ApiError) as e:
                why = str(e)
            time.sleep(0.05)
        log = (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{name} did not start ({why}):\n{log}")


def _with_metrics_certificate(command: list[str | Path], certificates: Path) -> list[str | Path]:
    """Kueue wants one at a fixed path, metrics or not: it gets an /etc of its own."""
    upper, work = certificates / "etc", certificates / "work"
    at = upper / "kueue" / "metrics" / "certs"
    at.mkdir(parents=True)
    work.mkdir()
    for file in ("tls.crt", "tls.key"):
        shutil.copy(certificates / file, at / file)
    mount = f"mount -t overlay overlay -o lowerdir=/etc,upperdir={upper},workdir={work} /etc"
    return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]


def _healthy(port: int) -> bool:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=limit(5)) as answer:
        return bool(answer.status == 200)
