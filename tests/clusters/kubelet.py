"""A small kubelet: one Node whose pods run as real processes. `python -m tests.clusters.kubelet CONFIG.json`

What it does as the real one: registers the node and renews its lease, runs init containers and containers
(container.py) with the environment, volumes, user and root filesystem that the pod asks for, reports their ends, gives
them the grace period when they are deleted, says why one cannot start, and serves their logs. What it does not: images
(one that `images` knows is this machine), probes (a container that runs is ready), resource limits, restarts within a
pod (restartPolicy is taken to be Never), containers side by side (they run one after the other).
"""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.clusters.api import MERGE, Api, ApiError, Object
from tests.clusters.container import die_with_parent
from tests.clusters.network import DNS, address, plug
from tests.clusters.pod_logs import Logs, serve_logs
from tests.clusters.pod_spec import NotYet, container_spec, volumes

LEASE_S = 2
RETRY_S = 1.0
CONTAINER = Path(__file__).with_name("container.py")


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Kubelet:
    def __init__(self, config: Object) -> None:
        self.config = config
        self.node: str = config["node"]
        self.api = Api(config["url"], Path(config["ca"]), config["token"])
        self.folder = Path(config["folder"])
        self.logs = Logs(self.folder / "logs")
        self._pods: dict[str, Pod] = {}
        self._given = 0

    def register(self, port: int) -> None:
        capacity = {"pods": "110", **self.config["capacity"]}
        labels = {"kubernetes.io/hostname": self.node, "kubernetes.io/os": "linux", **self.config["labels"]}
        self.api.create(
            "/api/v1/nodes",
            {
                "kind": "Node",
                "metadata": {"name": self.node, "labels": labels},
                "status": {
                    "capacity": capacity,
                    "allocatable": capacity,
                    "conditions": [self._ready()],
                    "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
                },
            },
        )  # fmt: skip

    def _ready(self) -> Object:
        return {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}

    def keep_alive(self) -> None:
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        stamp = {"holderIdentity": self.node, "leaseDurationSeconds": 4 * LEASE_S}
        with suppress(ApiError):
            self.api.create(leases, {"metadata": {"name": self.node}, "spec": stamp})
        while True:
            renewed = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            with suppress(ApiError, OSError):
                self.api.patch(f"{leases}/{self.node}", {"spec": {**stamp, "renewTime": renewed}}, MERGE)
            time.sleep(LEASE_S)

    def watch(self) -> None:
        """For ever: pods that are bound to this node come, change and go."""
        while True:
            with suppress(OSError, ApiError):
                for kind, found in self.api.watch(
                    "/api/v1/pods", timeout_s=600, fieldSelector=f"spec.nodeName={self.node}"
                ):
                    self._see(kind, found)
            time.sleep(0.2)

    def _see(self, kind: str, found: Object) -> None:
        uid = found["metadata"]["uid"]
        pod = self._pods.get(uid)
        if kind == "DELETED":
            if pod is not None:
                pod.delete(0)
                del self._pods[uid]
            return
        if pod is None:
            if found.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                return
            self._given += 1
            pod = self._pods[uid] = Pod(self, found, address(self.config["index"], self._given))
            threading.Thread(target=pod.live, name=pod.name).start()
        if "activeDeadlineSeconds" in found["spec"]:
            pod.limit(found["spec"]["activeDeadlineSeconds"])
        if "deletionTimestamp" in found["metadata"]:
            pod.delete(found["metadata"].get("deletionGracePeriodSeconds", 30))


class Pod:
    """From being bound to this node to its end, in a thread of its own."""

    def __init__(self, kubelet: Kubelet, found: Object, ip: str) -> None:
        self.kubelet, self.ip = kubelet, ip
        self.found = found
        self.meta, self.spec = found["metadata"], found["spec"]
        self.name, self.namespace, self.uid = self.meta["name"], self.meta["namespace"], self.meta["uid"]
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.folder = kubelet.folder / "pods" / self.uid
        self._states: dict[str, Object] = {}
        self._running: subprocess.Popen[bytes] | None = None
        self._told = threading.Event()  # to end
        self._deleted = threading.Event()
        self._reason: str | None = None
        self._begun, self._active_s = time.monotonic(), 0.0
        self._grace_s = 0.0
        self._killer: threading.Timer | None = None
        self._lock = threading.Lock()

    def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL when the grace is over."""
        with self._lock:
            first, sooner = not self._told.is_set(), self._killer is not None and grace_s < self._grace_s
            self._told.set()
            if not (first or sooner):
                return
            if self._killer is not None:
                self._killer.cancel()
            self._grace_s = grace_s
            self._killer = threading.Timer(grace_s, self._signal, [True])
            self._killer.daemon = True
            self._killer.start()
            self._signal(False)

    def _signal(self, kill: bool) -> None:
        running = self._running
        if running is not None and running.poll() is None:
            running.kill() if kill else running.terminate()

    def live(self) -> None:
        self.folder.mkdir(parents=True)
        phase = "Failed"
        try:
            with self._sandbox() as held:
                plug(self.kubelet.config["network"], held.pid, self.ip)
                phase = self._run_all(held.pid)
        finally:
            if self._killer is not None:
                self._killer.cancel()
            self._report("Failed" if self._reason else phase, over=True)
            self._deleted.wait()  # until then its status and its logs stand
            self._forget()

    def limit(self, active_s: float) -> None:
        """The time it may run, which can be shortened while it does."""
        if active_s == self._active_s:
            return
        self._active_s = active_s
        timer = threading.Timer(max(active_s - (time.monotonic() - self._begun), 0), self._too_long)
        timer.daemon = True
        timer.start()

    def _too_long(self) -> None:
        self._reason = "DeadlineExceeded"
        self.end(self.spec["terminationGracePeriodSeconds"])

    def delete(self, grace_s: float) -> None:
        self._deleted.set()
        self.end(grace_s)

    def _sandbox(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(CONTAINER), "--sandbox", self.host_name]
        held = _Held(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert held.stdout is not None
        if held.stdout.readline() != b"ready\n":
            raise RuntimeError("the sandbox did not start")
        return held

    @property
    def host_name(self) -> str:
        return str(self.spec.get("hostname") or self.name)[:63]

    def _run_all(self, sandbox_pid: int) -> str:
        mounted = self._patiently(lambda: volumes(self.kubelet.api, self.found, self.folder / "volumes"))
        if mounted is None:
            return "Failed"
        self._write_names()
        for container in self.spec.get("initContainers") or []:
            if self._run(container, mounted, sandbox_pid) != 0:
                return "Failed"
        codes = [self._run(container, mounted, sandbox_pid) for container in self.spec["containers"]]
        return "Failed" if any(codes) else "Succeeded"

    def _write_names(self) -> None:
        """/etc/hosts and /etc/resolv.conf, as the real one writes them."""
        domain = f"{self.namespace}.svc.cluster.local"
        subdomain = self.spec.get("subdomain")
        full = f"{self.host_name}.{subdomain}.{domain} " if subdomain else ""
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.ip} {full}{self.host_name}\n")
        search = f"search {domain} svc.cluster.local cluster.local"
        (self.folder / "resolv.conf").write_text(f"nameserver {DNS}\n{search}\noptions ndots:5\n")

    def _patiently(self, make: Any, container: str | None = None) -> Any:
        """What cannot be had yet is waited for, and the pod says what that is; None when it is deleted meanwhile."""
        while not self._told.is_set():
            try:
                return make()
            except NotYet as e:
                for each in [container] if container else self._names():
                    self._states[each] = {"waiting": {"reason": e.reason, "message": str(e)}}
                self._report("Pending")
                self._told.wait(RETRY_S)
        return None

    def _run(self, container: Object, mounted: dict[str, Object], sandbox_pid: int) -> int:
        name = container["name"]
        spec = self._patiently(lambda: self._spec(container, mounted, sandbox_pid), name)
        if spec is None:
            never = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "deleted before it started"}
            self._states[name] = {"terminated": never}
            return 137
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(spec))
        log = self.kubelet.logs.open(self.namespace, self.name, name)
        started = now()
        self._states[name] = {"running": {"startedAt": started}}
        command = [sys.executable, str(CONTAINER), str(file)]
        with self._lock:
            self._running = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        if self._told.is_set():
            self._signal(False)
        init = container in (self.spec.get("initContainers") or [])
        self._report("Pending" if init else "Running")
        assert self._running.stdout is not None
        log.copy(self._running.stdout)
        code = self._running.wait()
        code = code if code >= 0 else 128 - code
        reason = "Completed" if code == 0 else "StartError" if code == 128 else "Error"
        ended = {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": now()}
        if code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            ended["message"] = log.end()
        self._states[name] = {"terminated": ended}
        return code

    def _spec(self, container: Object, mounted: dict[str, Object], sandbox_pid: int) -> Object:
        image = container["image"]
        if not any(re.fullmatch(known, image) for known in self.kubelet.config["images"]):
            raise NotYet("ImagePullBackOff", f'Back-off pulling image "{image}": not found')
        api, environment = self.kubelet.api, self.kubelet.config["image_env"]
        spec = container_spec(api, self.found, container, mounted, environment, self.kubelet.node, self.ip)
        names = [("/etc/hosts", "hosts"), ("/etc/resolv.conf", "resolv.conf")]
        for at, file in names:
            mount = {"source": str(self.folder / file), "at": at, "read_only": False, "memory": False, "bytes": None}
            spec["mounts"].insert(0, mount)
        own = self.folder / f"root-{container['name']}"
        return {
            **spec,
            "join": [f"/proc/{sandbox_pid}/ns/net", f"/proc/{sandbox_pid}/ns/uts"],
            "root": str(own / "root"),
            "upper": str(own / "upper"),
            "work": str(own / "work"),
            "passable": self.kubelet.config["passable"],
            "installed": self.kubelet.config["installed"],
        }

    def _names(self) -> list[str]:
        both = (self.spec.get("initContainers") or []) + self.spec["containers"]
        return [container["name"] for container in both]

    def _report(self, phase: str, over: bool = False) -> None:
        ready = phase == "Running"
        status = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": self.ip,
            "podIPs": [{"ip": self.ip}],
            "startTime": self.meta["creationTimestamp"],
            "conditions": [
                {"type": kind, "status": "True" if true else "False", "lastTransitionTime": now()}
                for kind, true in (("Initialized", phase != "Pending"), ("Ready", ready), ("ContainersReady", ready))
            ],
            "containerStatuses": [self._status(c, over) for c in self.spec["containers"]],
            "initContainerStatuses": [self._status(c, over) for c in self.spec.get("initContainers") or []],
        }
        if self._reason and over:
            status["reason"] = self._reason
        for _ in range(20):
            try:
                self.kubelet.api.patch(f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": status})
                return
            except ApiError as e:
                if e.status in (404, 409):  # it is gone, or another has its name
                    return
                time.sleep(0.2)
            except OSError:
                time.sleep(0.2)

    def _status(self, container: Object, over: bool) -> Object:
        name = container["name"]
        waiting = {"waiting": {"reason": "PodInitializing" if self.spec.get("initContainers") else "ContainerCreating"}}
        never = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
        state = self._states.get(name)
        if state is None or (over and "waiting" in state):
            state = never if over else waiting
        done = "terminated" in state and state["terminated"]["exitCode"] == 0
        return {
            "name": name,
            "image": container["image"],
            "imageID": container["image"],
            "restartCount": 0,
            "ready": "running" in state or done,
            "started": "running" in state,
            "state": state,
        }

    def _forget(self) -> None:
        with suppress(ApiError, OSError):
            self.kubelet.api.delete(self.path, gracePeriodSeconds=0, preconditions={"uid": self.uid})
        shutil.rmtree(self.folder, ignore_errors=True)
        self.kubelet.logs.forget(self.namespace, self.name)


class _Held(subprocess.Popen[bytes]):
    """A process that is killed where its block ends."""

    def __exit__(self, *error: Any) -> None:
        self.kill()
        super().__exit__(*error)


def main() -> None:
    die_with_parent()
    config = json.loads(Path(sys.argv[1]).read_text())
    kubelet = Kubelet(config)
    port = serve_logs(kubelet.logs, Path(config["certificate"]), Path(config["key"]))
    kubelet.register(port)
    threading.Thread(target=kubelet.keep_alive, daemon=True).start()
    print("ready", flush=True)
    kubelet.watch()


if __name__ == "__main__":
    main()
