"""What schedulers and machines answer: Slurm, Kubernetes, Ray, nvidia-smi and AMD's tools."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Target, reader
from tests.fuzz.samples import file_target, texts_of


def a_job(backend: str, id: str, **where: str) -> Any:
    from shoal.launch.job import Job

    return Job("demo", backend, id, 1.7e9, 2, 8, "/w", "ab", where)


@reader(
    "slurm",
    "launch.slurm.states",
    "launch.slurm.hostlist",
    "launch.slurm.reasons",
    "launch.slurm.cores",
    quick=100,
    share=100,
)
def slurm(folder: Path) -> Target:
    from shoal.launch.slurm import states
    from shoal.launch.slurm.hostlist import expand

    squeue = b"123     |RUNNING   |None  |0 |n[1-3,07],gpu2 |2026-11-16T02:00:00 |N/A |0:0 |\n123_4|PENDING|Priority|2||2026-11-16T02:00:00|N/A|512|\n"  # noqa: E501
    sacct = b"123|CANCELLED by 0|143:0|2026-11-16T02:00:00|2026-11-16T03:00:00|n[1-2]\n125|FAILED|2:0|Unknown|Unknown|None assigned\n"  # noqa: E501
    lists = (
        b"n[1-99999][1-99999]",
        b"n[1-3]",
        b"n[0-9,1-5]x[1-9]",
        b"n[9-1]",
        b"[",
        b"n[1-]",
        b"a,b,c[1,2]",
        b"n[00001-99999]",
    )

    def generate(rng: Random) -> str:
        data = rng.choice((squeue, sacct))
        if rng.random() < 0.4:
            data = data.replace(b"n[1-3,07],gpu2", damaged(rng, rng.choice(lists))).replace(
                b"n[1-2]", rng.choice(lists)
            )
        if rng.random() < 0.7:
            data = damaged(rng, data)
        return data.decode("utf-8", "replace")

    job = a_job("slurm", "123")

    def read(text: str) -> None:
        states.ask = lambda command, **more: text  # type: ignore[assignment]
        states.states([job])
        for parse in (states.parse_squeue, states.parse_sacct):
            for said in {one.id: one for one in parse(text)}.values():  # a job once, as `states` does
                states.state("123", said, None)
        if len(expand(text[:300])) > 200_000:
            raise Finding("more nodes than any cluster has")

    return Target(generate, read)


def cluster_objects() -> list[dict[str, Any]]:
    meta = {
        "name": "demo",
        "uid": "u1",
        "labels": {"shoal/job": "demo", "kueue.x-k8s.io/queue-name": "t"},
        "annotations": {},
    }
    pod = {
        "kind": "Pod",
        "metadata": {
            **meta,
            "uid": "p0",
            "creationTimestamp": "2026-11-16T02:00:00Z",
            "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
        },
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Failed",
            "reason": "Evicted",
            "message": "m",
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
                }
            ],
            "containerStatuses": [
                {
                    "image": "x:1",
                    "state": {
                        "terminated": {
                            "exitCode": 78,
                            "reason": "Error",
                            "message": "shoal: bad.",
                            "startedAt": "2026-11-16T02:00:01Z",
                        }
                    },
                }
            ],
        },
    }
    waits = {
        **pod,
        "metadata": {**pod["metadata"], "uid": "p1", "annotations": {"batch.kubernetes.io/job-completion-index": "1"}},
        "status": {
            "phase": "Pending",
            "containerStatuses": [
                {"image": "x:1", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}
            ],
        },
    }  # type: ignore[dict-item]
    job = {
        "kind": "Job",
        "metadata": meta,
        "spec": {"completions": 2, "suspend": True},
        "status": {
            "conditions": [
                {
                    "type": "Failed",
                    "status": "True",
                    "reason": "PodFailurePolicy",
                    "message": "exit code 78",
                    "lastTransitionTime": "2026-11-16T02:00:00Z",
                }
            ]
        },
    }
    running = {**job, "status": {}, "spec": {"completions": 2, "suspend": False}}
    jobset = {
        **job,
        "kind": "JobSet",
        "status": {
            "conditions": [{"type": "Completed", "status": "True", "lastTransitionTime": "2026-11-16T02:00:00Z"}]
        },
    }
    workload = {
        "kind": "Workload",
        "metadata": {"name": "w", "ownerReferences": [{"uid": "u1"}]},
        "spec": {"active": True},
        "status": {
            "conditions": [
                {"type": "QuotaReserved", "status": "False", "message": "insufficient quota"},
                {"type": "Evicted", "status": "True", "reason": "Preempted"},
            ]
        },
    }
    event = {
        "kind": "Event",
        "metadata": {"name": "e"},
        "involvedObject": {"uid": "p1"},
        "message": "exceeded quota: few, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=12, limited: requests.nvidia.com/gpu=16",  # noqa: E501
    }
    inner = {**running, "metadata": {**meta, "labels": {**meta["labels"], "jobset.sigs.k8s.io/jobset-name": "demo"}}}  # type: ignore[dict-item]
    return [job, running, jobset, pod, waits, workload, event, inner]


@reader(
    "kubernetes",
    "launch.kubernetes.client",
    "launch.kubernetes.states",
    "launch.kubernetes.why",
    "launch.kubernetes.backend",
    "launch.kubernetes.cores",
    quick=250,
    share=60,
)
def kubernetes(folder: Path) -> Target:
    """Whatever a cluster lists, `ps` and `launch` say what they can make of it."""
    from shoal.errors import ShoalError
    from shoal.launch.kubernetes.backend import Kubernetes
    from shoal.launch.kubernetes.client import Cluster

    objects = cluster_objects()
    job = a_job("kubernetes", "ns/demo", kind="jobs.batch", context="c", kueue="t")

    def generate(rng: Random) -> bytes:
        some = rng.sample(objects, rng.randrange(2, len(objects)))
        return texts(rng, {"kind": "List", "items": some})

    def texts(rng: Random, good: Any) -> bytes:
        text = encoded(mutated(rng, good))
        return text if rng.random() < 0.9 else damaged(rng, text)

    def read(data: bytes) -> None:
        answer = data.decode("utf-8", "replace")
        Cluster.call = lambda self, *args, **more: answer  # type: ignore[method-assign]
        Cluster().find("ns", "jobs.batch", "demo")
        Cluster().create({"kind": "Job", "metadata": {"name": "demo"}})
        for state in Kubernetes().states([job]).values():
            if len(state.why) > 3000:
                raise Finding("a reason without an end")

    return Target(generate, read, (ShoalError,))


@reader("ray", "launch.ray.client", "launch.ray.states", "launch.ray.backend", quick=30, share=10)
def ray(folder: Path) -> Target:
    """Ray's dashboard, over HTTP as its client asks it."""
    from shoal.errors import ShoalError
    from shoal.launch.ray import client as c
    from shoal.launch.ray.backend import Ray

    details = {
        "type": "SUBMISSION",
        "submission_id": "s1",
        "job_id": "01",
        "status": "FAILED",
        "message": "shoal: bad.",
        "entrypoint": "exec python -m x",
        "start_time": 1700000000000,
        "end_time": 1700000001000,
        "driver_exit_code": 78,
        "error_type": "E",
        "metadata": {},
        "runtime_env": {},
        "driver_agent_http_address": "",
        "driver_node_id": "n",
    }
    from ray.dashboard.modules.dashboard_sdk import SubmissionClient

    class Answer:
        status_code = 200

        def __init__(self, text: bytes) -> None:
            self.content, self.text = text, text.decode("utf-8", "replace")

        def json(self) -> Any:
            return json.loads(self.text)

        def raise_for_status(self) -> None: ...

    answer = [b"[]"]
    made = {"version": "4", "ray_version": "2.40", "ray_commit": "x", "session_name": "s"}

    def ask(self: Any, method: str, endpoint: str, **more: Any) -> Any:
        return Answer(json.dumps(made).encode() if "version" in endpoint else answer[0])

    SubmissionClient._do_request = ask  # type: ignore[method-assign]
    c.Cluster.groups = lambda self: {}  # type: ignore[method-assign]
    job = a_job("ray", "s1", address="http://127.0.0.1:1")

    def read(data: bytes) -> None:
        answer[0] = data
        for state in Ray().states([job]).values():
            if len(state.why) > 3000:
                raise Finding("a reason without an end")

    return Target(texts_of([details, {**details, "status": "RUNNING"}]), read, (ShoalError,))


@reader("ray-bundle", "launch.bundle", "launch.ray.driver", "launch.ray.node", quick=60, share=8)
def ray_bundle(folder: Path) -> Target:
    """What travels to a Ray cluster, as its driver and its nodes unpack it."""
    from shoal.errors import ShoalError
    from shoal.launch.ray.driver import request_in
    from shoal.launch.ray.node import _unpack

    run = "name: demo\nmodel: {dim: 32, layers: 1, heads: 2}\ndata: {train: data}\ntrain: {steps: 5}\n"

    def generate(rng: Random) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name in ("run.yaml", rng.choice(("a/b.py", "../x", "/etc/x", "run.yaml", "a\nb"))):
                entry = tarfile.TarInfo(name)
                entry.size = len(run)
                entry.type = rng.choice(
                    (tarfile.REGTYPE,) * 6 + (tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.LNKTYPE)
                )
                entry.linkname = rng.choice(("", "/etc/passwd", ".."))
                tar.addfile(entry, io.BytesIO(run.encode()))
        plain = out.getvalue() if rng.random() < 0.3 else damaged(rng, out.getvalue(), head=512)
        packed = gzip.compress(plain, compresslevel=1)
        return rng.choices((packed, damaged(rng, packed, head=64), plain), (8, 1, 1))[0]

    def read(data: bytes) -> None:
        import shutil

        file, into = folder / "b.tar", folder / "in" / "x"
        file.write_bytes(data)
        shutil.rmtree(into, ignore_errors=True)
        try:
            request_in(file, "/w", "python")
        finally:
            with suppress(
                tarfile.TarError, OSError, ValueError, EOFError
            ):  # Ray's actor ends with it; its driver tells
                _unpack(data, into)
            if (folder / "x").exists() or (folder / "in" / ".." / "x").resolve().exists():
                raise Finding("written outside of its folder")

    return Target(generate, read, (ShoalError,))


@reader("nvidia-smi", "devices.nvidia", "devices.gpu", quick=400, share=150)
def nvidia_smi(folder: Path) -> Target:
    from shoal.devices import nvidia

    good = b"NVIDIA H200, 143771, 00000000:19:00.0, GPU-6a\nNVIDIA GB10, [N/A], 0000000F:01:00.0, GPU-7b\n"
    return Target(lambda rng: damaged(rng, good).decode("utf-8", "replace"), nvidia.read)


@reader("amd-smi", "devices.amd", quick=400, share=150)
def amd_smi(folder: Path) -> Target:
    from shoal.devices import amd

    smi = {
        "gpu_data": [
            {
                "gpu": 0,
                "asic": {"market_name": "AMD Instinct MI300X"},
                "bus": {"bdf": "0000:0c:00.0"},
                "vram": {"size": {"value": 196592, "unit": "MB"}},
            }
        ]
    }
    rocm = {
        "card0": {
            "Card Series": "Arcturus [AMD Instinct MI100]",
            "VRAM Total Memory (B)": "34342961152",
            "PCI Bus": "0000:0c:00.0",
        },
        "system": {"Driver version": "6"},
    }

    def read(path: Path) -> None:
        amd.ask = lambda command, limit_s: path.read_text("utf-8", "replace")  # type: ignore[assignment]
        for gpu in amd._named(1.0):
            if gpu.memory_bytes is not None and not 0 <= gpu.memory_bytes < 1 << 62:
                raise Finding("a memory that no GPU has")

    return file_target(folder / "a", texts_of(smi, smi["gpu_data"], rocm), read)
