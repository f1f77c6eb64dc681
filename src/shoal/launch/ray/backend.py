"""A Ray cluster as a scheduler: what `shoal launch`, `ps`, `logs` and `stop` do there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import yaml

from shoal.errors import ShoalError, UsageError
from shoal.launch.backend import Rendered, State
from shoal.launch.job import Job
from shoal.launch.ray import rayjob
from shoal.launch.ray.checks import KUBERAY, check, unused
from shoal.launch.ray.client import Cluster
from shoal.launch.ray.states import states
from shoal.launch.ray.submission import job_id, package, package_name, submission
from shoal.launch.request import Request


class Ray:
    name = "ray"

    def render(self, request: Request) -> list[Rendered]:
        check(request)
        if request.launch.ray.address == KUBERAY:
            return [Rendered("rayjob.yaml", rayjob.text(request))]
        text = yaml.safe_dump(submission(request), sort_keys=False, width=120, allow_unicode=True)
        if ignored := unused(request):
            text = f"# not used, since the Ray cluster is there already: {', '.join(ignored)}\n{text}"
        return [Rendered("job.yaml", f"# POST /api/jobs/\n{text}")]

    def submit(self, request: Request) -> Job:
        check(request)
        if request.launch.ray.address == KUBERAY:
            raise UsageError(
                "launch.ray.address is kuberay, which is rendered and not sent: "
                "`shoal launch RUN.yaml --on ray --render | kubectl create -f -`."
            )
        secrets, job = request.secret_env(), job_id(request)  # what is missing is said before anything is sent
        cluster = Cluster(request.launch.ray.address)
        if not cluster.has(package_name(request)):
            cluster.put(package_name(request), package(request))
        cluster.put_secrets(job, secrets)
        try:
            cluster.submit(submission(request))
        except BaseException:
            cluster.put_secrets(job, {})  # no driver will come to take them out
            raise
        return Job(
            run=request.name,
            backend=self.name,
            id=job,
            submitted=time.time(),
            nodes=request.launch.nodes,
            gpus=request.launch.gpus,
            workspace=request.there,
            bundle=request.bundle.sha256,
            where={"address": cluster.address},
        )

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        together: dict[str, list[Job]] = {}
        for job in jobs:
            together.setdefault(job.where["address"], []).append(job)
        found: dict[str, State] = {}
        for address, these in together.items():
            try:
                found |= _states(Cluster(address), these)
            except ShoalError as e:  # one cluster that is away does not hide the others
                found |= {job.id: State("unknown", str(e).rstrip(".")) for job in these}
        return found

    def logs(self, job: Job, follow: bool, lines: int | None) -> Iterator[str]:
        cluster = Cluster(job.where["address"])
        said = cluster.logs(job.id).splitlines()
        before = 0 if lines is None else max(0, len(said) - lines)
        if not follow:
            yield from said[before:]
            return
        rest = ""
        for piece in cluster.follow(job.id):
            *whole, rest = (rest + piece).split("\n")
            yield from whole[before:]
            before = max(0, before - len(whole))
        if rest:
            yield rest

    def stop(self, job: Job, now: bool) -> None:
        Cluster(job.where["address"]).stop(job.id, now)


def _states(cluster: Cluster, jobs: list[Job]) -> dict[str, State]:
    """Two calls, however many jobs."""
    found = cluster.jobs()
    running = any(found[job.id].status.value == "RUNNING" for job in jobs if job.id in found)
    return states(jobs, found, cluster.groups() if running else {})
