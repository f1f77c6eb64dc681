"""The pod of one node: the agent's container, what it may use of the node, and what it must not."""

from __future__ import annotations

import shlex
from pathlib import Path, PurePosixPath

from shoal.errors import TRANSIENT, WRONG_ENVIRONMENT
from shoal.journal.rundir import RunDir
from shoal.launch.kubernetes import names
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.request import PORT, Request
from shoal.observe.prometheus import PORT as METRICS_PORT

BUNDLE_AT, CODE_AT = "/shoal/bundle", "/shoal/code"
TAR = "bundle.tar.gz"
# The label that tells which GPU a node has, by who makes it: of NVIDIA's feature discovery and AMD's node labeller.
PRODUCT_LABELS = {"nvidia.com": "nvidia.com/gpu.product", "amd.com": "amd.com/gpu.product-name"}
MIB = 2**20


def template(request: Request, head: str, job_uid_label: str) -> Manifest:
    """`head`: the address of node 0's agent; `job_uid_label`: the pod's label that holds the id of the whole job."""
    launch = request.launch
    annotations = names.notes(request)
    if launch.kubernetes.kueue and launch.kubernetes.topology:
        annotations["kueue.x-k8s.io/podset-required-topology"] = launch.kubernetes.topology
    return {
        "metadata": {"labels": names.labels(request), "annotations": annotations},
        "spec": _spec(request, head, job_uid_label),
    }


def _spec(request: Request, head: str, job_uid_label: str) -> Manifest:
    launch, own = request.launch, request.launch.kubernetes
    spec: Manifest = {
        "restartPolicy": "Never",  # what a pod failure policy asks for; the agent itself restarts workers
        "terminationGracePeriodSeconds": round(request.warning_s),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Another is process 1 then: it reaps orphans, and the agent dies of a signal that it does not handle yet.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": own.user,
            "runAsGroup": own.user,
            "fsGroup": own.user,
            "fsGroupChangePolicy": "OnRootMismatch",  # a claim of millions of files is not walked at every start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, head, job_uid_label)],
        "volumes": [volume for volume, _ in _mounts(request)],
    }
    if request.time_limit_s is not None:
        # Of the pod, not of the Job, which would be failed for good: the agent is told, saves, leaves with 143, and
        # the Job makes a new pod.
        spec["activeDeadlineSeconds"] = round(request.time_limit_s - request.warning_s)
    if own.service_account:
        spec["serviceAccountName"] = own.service_account
    if own.pull_secret:
        spec["imagePullSecrets"] = [{"name": own.pull_secret}]
    if launch.priority and not own.kueue:
        spec["priorityClassName"] = launch.priority
    if selector := node_selector(request):
        spec["nodeSelector"] = selector
    if tolerations := _tolerations(request):
        spec["tolerations"] = tolerations
    if launch.nodes > 1 and not launch.gpus:
        # One agent a machine where that is possible. Pods with GPUs are left to the scheduler, which packs them.
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {names.JOB: request.label}},
            }
        ]
    return spec


def _container(request: Request, head: str, job_uid_label: str) -> Manifest:
    capabilities: Manifest = {"drop": ["ALL"]}
    if request.launch.kubernetes.rdma:
        capabilities["add"] = ["IPC_LOCK"]  # memory that a network card writes to stays where it is
    return {
        "name": names.CONTAINER,
        "image": request.launch.image,
        "command": ["/bin/sh", "-c", script(request)],
        "workingDir": CODE_AT,
        "env": _environment(request, head, job_uid_label),
        "ports": _ports(request),
        "resources": _resources(request),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last lines of the log say what ended it
        "volumeMounts": [mount for _, mount in _mounts(request)],
    }


def _ports(request: Request) -> list[Manifest]:
    found: list[Manifest] = [{"name": "head", "containerPort": PORT}]
    if request.launch.kubernetes.metrics:
        found.append({"name": "metrics", "containerPort": METRICS_PORT})
    return found


def script(request: Request) -> str:
    """The code is unpacked by the container itself: no second image to pull, and none that must know how."""
    lines = ["set -eu", f"tar xzf {BUNDLE_AT}/{TAR} -C {CODE_AT} || exit {TRANSIENT}"]
    for name, reference in request.launch.secrets.items():
        kind, _, path = reference.partition(":")
        if kind == "file":
            lines.append(f'{name}="$(cat {shlex.quote(path)})" || exit {WRONG_ENVIRONMENT}; export {name}')
    if any(name.startswith("code/") for name in request.bundle.files):
        lines += [f"cd {CODE_AT}/code", 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"']
    lines += [f"{{ {line}\n}} || exit {TRANSIENT}" for line in request.launch.setup]
    if request.launch.kubernetes.metrics:
        run_dir = f"{request.there}/{RunDir.of(request.name, Path()).path}"
        serve = [request.python, "-m", "shoal.observe.prometheus", run_dir, "--port", str(METRICS_PORT)]
        # In the background of a subshell: no child of the agent's, and ended with the container.
        lines.append(f'[ "$SHOAL_NODE" != 0 ] || ({shlex.join(serve)} &)')
    return "\n".join([*lines, f"exec {shlex.join(request.agent(CODE_AT))}"]) + "\n"


def _environment(request: Request, head: str, job_uid_label: str) -> list[Manifest]:
    own = request.launch.kubernetes
    # No home in a read-only image, and no entry in its passwd for the user: libraries ask for both.
    values: dict[str, str] = {
        "HOME": "/tmp",
        "USER": "shoal",
        "PYTHONUNBUFFERED": "1",
        **request.plain_env(),
        "SHOAL_HEAD": head,
    }
    found: list[Manifest] = [
        {"name": "SHOAL_NODE", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{names.INDEX}']"}}},
        # With its id: a job of the same name that a person launches later begins with a whole budget of restarts.
        {
            "name": "SHOAL_JOB_UID",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{job_uid_label}']"}},
        },
        {"name": "SHOAL_JOB", "value": f"{own.namespace}/{request.label}/$(SHOAL_JOB_UID)"},
        *({"name": name, "value": value.replace("$(", "$$(")} for name, value in values.items()),
    ]
    for name, (secret, key) in secret_keys(request).items():
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def secret_keys(request: Request) -> dict[str, tuple[str, str]]:
    """Of each variable that is a secret: the Secret it is in, and its key there."""
    found = {"SHOAL_TOKEN": (request.label, "SHOAL_TOKEN")}
    for name, reference in request.launch.secrets.items():
        kind, _, what = reference.partition(":")
        if kind == "env":
            found[name] = (request.label, name)
        elif kind == "kubernetes":
            secret, _, key = what.partition("/")
            found[name] = (secret, key)
    return found


def _resources(request: Request) -> Manifest:
    """Cores are asked for and not limited: a limit throttles threads in the middle of a step."""
    launch = request.launch
    requests, limits = {"cpu": str(request.cpus)}, {}
    if launch.memory_gb is not None:
        requests["memory"] = limits["memory"] = f"{round(launch.memory_gb * 1024)}Mi"
    devices = {request.gpu_resource: launch.gpus} if launch.gpus else {}
    for resource, count in {**devices, **launch.kubernetes.rdma}.items():
        requests[resource] = limits[resource] = str(count)
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _mounts(request: Request) -> list[tuple[Manifest, Manifest]]:
    """Each volume and where it is mounted."""
    shm = round(request.launch.kubernetes.shm_gb * 1024)
    found: list[tuple[Manifest, Manifest]] = [
        (
            {"name": "bundle", "configMap": {"name": request.label}},
            {"name": "bundle", "mountPath": BUNDLE_AT, "readOnly": True},
        ),
        ({"name": "code", "emptyDir": {}}, {"name": "code", "mountPath": CODE_AT}),
        ({"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}),
        (
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm}Mi"}},
            {"name": "shm", "mountPath": "/dev/shm"},
        ),
    ]
    for i, volume in enumerate(request.launch.volumes):
        source: Manifest
        if volume.claim is not None:
            source = {"persistentVolumeClaim": {"claimName": volume.claim}}
        else:
            source = {"hostPath": {"path": volume.host}}
        mount: Manifest = {"name": f"volume-{i}", "mountPath": volume.at}
        if volume.read_only:
            mount["readOnly"] = True
        found.append(({"name": f"volume-{i}", **source}, mount))
    if not in_a_volume(request, request.there):
        found.append(({"name": "workspace", "emptyDir": {}}, {"name": "workspace", "mountPath": request.there}))
    return found


def in_a_volume(request: Request, path: str) -> bool:
    """Whether what is written there outlives the pod."""
    return any(
        not volume.read_only and PurePosixPath(path).is_relative_to(PurePosixPath(volume.at))
        for volume in request.launch.volumes
    )


def node_selector(request: Request) -> dict[str, str]:
    launch, own = request.launch, request.launch.kubernetes
    selector = dict(own.node_selector)
    if launch.gpus and launch.gpu_type:
        label = PRODUCT_LABELS[request.gpu_resource.split("/")[0]]
        selector.setdefault(label, launch.gpu_type.replace(" ", "-"))
    return selector


def _tolerations(request: Request) -> list[Manifest]:
    launch, own = request.launch, request.launch.kubernetes
    keys = [request.gpu_resource] if launch.gpus else []  # a taint of that name keeps others off nodes with GPUs
    keys += [key for key in own.tolerations if key not in keys]
    return [{"key": key, "operator": "Exists"} for key in keys]
