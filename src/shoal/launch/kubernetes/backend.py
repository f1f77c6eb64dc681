"""Kubernetes as a scheduler: what `shoal launch`, `ps`, `logs` and `stop` do there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml

from shoal.errors import ShoalError, UsageError
from shoal.launch.backend import OVER, Rendered, State
from shoal.launch.cores import is_open
from shoal.launch.job import Job
from shoal.launch.kubernetes import logs, manifests, names, why
from shoal.launch.kubernetes.checks import check
from shoal.launch.kubernetes.client import Cluster, Refused, condition, current_context
from shoal.launch.kubernetes.cores import with_cores
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.kubernetes.states import Seen, state
from shoal.launch.request import Request

JOBS, JOBSETS = "jobs.batch", "jobsets.jobset.x-k8s.io"
WORKLOADS = "workloads.kueue.x-k8s.io"
MOST_NAMED = 50  # jobs in one selector; more are found among all of Shoal's in the namespace
LEAVING_S = 600  # for a job that is being removed


class Kubernetes:
    name = "kubernetes"

    def render(self, request: Request) -> list[Rendered]:
        check(request)
        asked = _asked_for_jobset(request)
        as_jobset = bool(asked)
        documents = [manifests.job(request, as_jobset), *manifests.belongings(request, as_jobset)]
        text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)
        if is_open(request):
            text = (
                "# launch.cpus is empty: where the cluster tells what its nodes have, the GPUs' share of their cores\n"
                f"# is asked for instead of {request.cpus}.\n{text}"
            )
        if asked is None:
            text = (
                "# launch.kubernetes.jobset is auto: a cluster that knows JobSets gets one instead of the Job and the\n"
                f"# Service; set it to true to see that.\n{text}"
            )
        return [Rendered("job.yaml", text)]

    def submit(self, request: Request) -> Job:
        check(request)
        secrets = request.secret_env()  # what is missing is said before anything is sent
        own = request.launch.kubernetes
        cluster = Cluster(own.context or current_context())
        try:
            as_jobset = _as_jobset(request, cluster)
            request = with_cores(request, cluster)
            _make_room(request, cluster)
            _create(request, cluster, as_jobset, secrets)
        except Refused as e:
            raise _sentence(e, request, cluster) from e
        where = {"kind": _kind(as_jobset)}
        where |= {"context": cluster.context} if cluster.context else {}
        where |= {"kueue": str(request.launch.queue)} if own.kueue else {}
        return Job(
            run=request.name,
            backend=self.name,
            id=f"{own.namespace}/{request.label}",
            submitted=time.time(),
            nodes=request.launch.nodes,
            gpus=request.launch.gpus,
            workspace=request.there,
            bundle=request.bundle.sha256,
            where=where,
        )

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        together: dict[tuple[str | None, str], list[Job]] = {}
        for job in jobs:
            together.setdefault((job.where.get("context"), _namespace(job)), []).append(job)
        found: dict[str, State] = {}
        for (context, namespace), these in together.items():
            try:
                found |= _states(Cluster(context), namespace, these)
            except (Refused, ShoalError) as e:  # one cluster that is away does not hide the others
                error = why.refusal(e, Cluster(context).spoken, namespace) if isinstance(e, Refused) else e
                found |= {job.id: State("unknown", str(error).rstrip(".?")) for job in these}
        return found

    def logs(self, job: Job, follow: bool, lines: int | None) -> Iterator[str]:
        cluster, namespace, name = Cluster(job.where.get("context")), _namespace(job), _name(job)
        if not follow:
            return logs.merged(cluster, namespace, name, lines)
        return logs.follow(
            cluster, namespace, name, 20 if lines is None else lines, lambda: self.states([job])[job.id].phase in OVER
        )

    def stop(self, job: Job, now: bool) -> None:
        """Removes the job, which tells its pods to save and leave; they have their grace for it."""
        cluster, namespace, name = Cluster(job.where.get("context")), _namespace(job), _name(job)
        kind = job.where.get("kind", JOBS)
        try:
            cluster.call(
                "annotate", kind, name, "-n", namespace, "--overwrite", f"{names.STOPPED}={round(time.time())}"
            )
            _remove(cluster, namespace, kind, name)
            if now:
                selected = ["--selector", f"{names.JOB}={name}"]
                cluster.call("delete", "pods", "-n", namespace, *selected, "--grace-period=1", "--wait=false")
        except Refused as e:
            if e.reason != "NotFound":  # it has just ended by itself, or somebody was faster
                raise why.refusal(e, cluster.spoken, namespace) from e


class _Plain(yaml.SafeDumper):
    """As a person would write it: no references, scripts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def _states(cluster: Cluster, namespace: str, jobs: list[Job]) -> dict[str, State]:
    if len(jobs) <= MOST_NAMED:
        selector = f"{names.JOB} in ({','.join(sorted({_name(job) for job in jobs}))})"
    else:
        selector = f"{names.MANAGED}=shoal"
    kinds = sorted({JOBS, *(job.where.get("kind", JOBS) for job in jobs)})
    objects = cluster.get(namespace, [*kinds, "pods"], selector)
    seen = Seen.of(objects)
    found = {job.id: state(job, seen) for job in jobs}
    if not any(each.phase in ("waiting", "starting") for each in found.values()):
        return found
    # Why they wait stands elsewhere too; one list each, and no reason to fail where we may not look.
    objects += _if_allowed(cluster, namespace, "events", "type=Warning")
    if any("kueue" in job.where for job in jobs):
        objects += _if_allowed(cluster, namespace, WORKLOADS)
    seen = Seen.of(objects)
    return {job.id: state(job, seen) for job in jobs}


def _if_allowed(cluster: Cluster, namespace: str, kind: str, fields: str = "") -> list[Manifest]:
    try:
        return cluster.get(namespace, [kind], fields=fields)
    except (Refused, ShoalError):
        return []


def _asked_for_jobset(request: Request) -> bool | None:
    """None: the cluster decides."""
    own = request.launch.kubernetes
    if request.run.batch is not None:
        return False  # its pods need not be there together
    if own.jobset != "auto":
        return own.jobset
    if own.kueue and request.least_nodes < request.launch.nodes:
        return False  # Kueue admits a part of a Job, never of a JobSet
    return None


def _as_jobset(request: Request, cluster: Cluster) -> bool:
    asked = _asked_for_jobset(request)
    if asked is not None:
        return asked
    known = cluster.call("api-resources", f"--api-group={JOBSETS.partition('.')[2]}", "-o", "name")
    return JOBSETS in known.split()


def _make_room(request: Request, cluster: Cluster) -> None:
    """The name of a run is taken by one job at a time: one that is over makes room, one that lives is not disturbed."""
    namespace, name = request.launch.kubernetes.namespace, request.label
    for kind in (JOBS, JOBSETS):
        try:
            there = cluster.find(namespace, kind, name)
        except Refused as e:
            if kind == JOBSETS and e.reason in ("NoSuchKind", "Forbidden", "NotFound"):
                continue
            raise
        if there is None:
            continue
        run = there["metadata"]["annotations"].get(names.RUN)
        if run != request.name:
            whose = f"run '{run}'" if run else "somebody else"
            raise UsageError(
                f"namespace '{namespace}' has a job named '{name}' already, of {whose}; give the run another name."
            )
        over = any(condition(there, end) for end in ("Complete", "Completed", "Failed"))
        if not over and not there["metadata"].get("deletionTimestamp"):
            raise UsageError(
                f"run '{request.name}' is at {cluster.spoken} already, as {namespace}/{name}; "
                f"`shoal stop {request.name}` first, or give this one another name."
            )
        _remove(cluster, namespace, kind, name)
        with suppress(Refused):  # gone already
            cluster.call("wait", "--for=delete", f"{kind}/{name}", "-n", namespace, f"--timeout={LEAVING_S}s")


def _create(request: Request, cluster: Cluster, as_jobset: bool, secrets: Mapping[str, str]) -> None:
    """The job last: a pod that misses its Secret is looked at again only after many seconds. Then all belongs to it."""
    namespace = request.launch.kubernetes.namespace
    belongings = manifests.belongings(request, as_jobset, secrets)
    things = cluster.create_all(namespace, belongings)
    try:
        created = cluster.create(manifests.job(request, as_jobset))
    except BaseException:
        cluster.delete(namespace, things)
        raise
    cluster.adopt(namespace, belongings, manifests.owned_by(created))


def _remove(cluster: Cluster, namespace: str, kind: str, name: str) -> None:
    """Kept until its pods have left, so that it can be seen to be leaving."""
    cluster.delete(namespace, [f"{kind}/{name}"], "--cascade=foreground")


def _sentence(refused: Refused, request: Request, cluster: Cluster) -> ShoalError:
    namespace = request.launch.kubernetes.namespace
    if refused.reason == "AlreadyExists":
        return UsageError(
            f"namespace '{namespace}' has something named '{request.label}' already ({refused.message}); "
            "give the run another name, or remove that first."
        )
    return why.refusal(refused, cluster.spoken, namespace)


def _kind(as_jobset: bool) -> str:
    return JOBSETS if as_jobset else JOBS


def _namespace(job: Job) -> str:
    return job.id.rpartition("/")[0]


def _name(job: Job) -> str:
    return job.id.rpartition("/")[2]
