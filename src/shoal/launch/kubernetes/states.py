"""What the objects of a cluster say of a job, in Shoal's words. Pure: lists of objects in, a State out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.errors import TOLD_TO_STOP, WRONG_ENVIRONMENT, WRONG_USAGE
from shoal.launch.backend import State
from shoal.launch.job import Job
from shoal.launch.kubernetes import names, why
from shoal.launch.kubernetes.client import condition
from shoal.launch.kubernetes.names import Manifest
from shoal.launch.kubernetes.things import index_of, thing, time_of

GONE = State("gone", "the cluster has it no more: stopped, or removed when launch.kubernetes.keep had passed")


@dataclass
class Seen:
    """All that was listed of a namespace, by the job it belongs to."""

    jobs: dict[str, Manifest] = field(default_factory=dict)  # what was submitted: a Job or a JobSet
    inner: dict[str, Manifest] = field(default_factory=dict)  # the Job of a JobSet
    pods: dict[str, list[Manifest]] = field(default_factory=dict)
    workloads: dict[str, Manifest] = field(default_factory=dict)  # by the id of their owner
    warnings: dict[str, list[str]] = field(default_factory=dict)  # by the id of what they are about, the newest last

    @classmethod
    def of(cls, objects: Sequence[Manifest]) -> Seen:
        seen = cls()
        for each in map(thing, objects):
            name = each["metadata"]["labels"].get(names.JOB, "")
            match each["kind"]:
                case "Pod":
                    seen.pods.setdefault(name, []).append(each)
                case "JobSet":
                    seen.jobs[name] = each
                case "Job" if "jobset.sigs.k8s.io/jobset-name" in each["metadata"]["labels"]:
                    seen.inner[name] = each
                case "Job":
                    seen.jobs[name] = each
                case "Workload":
                    for owner in each["metadata"].get("ownerReferences") or ():
                        seen.workloads[owner.get("uid", "")] = each
                case "Event":
                    about = seen.warnings.setdefault(each["involvedObject"].get("uid", ""), [])
                    about.append(each.get("message", ""))
        return seen


def state(job: Job, seen: Seen) -> State:
    name = job.id.rpartition("/")[2]
    found = seen.jobs.get(name)
    if found is None:
        return GONE
    runs = seen.inner.get(name, found) if found["kind"] == "JobSet" else found
    pods, odd = _placed(seen.pods.get(name, []), max(job.nodes, runs["spec"].get("completions") or 0) - 1)
    newest = _newest(pods)
    said = _state(job, found, runs, newest, pods, seen)
    return said if not odd else replace(said, why=f"{said.why}; {_left_out(odd)}")


def _state(
    job: Job, found: Manifest, runs: Manifest, newest: dict[int, Manifest], pods: list[Manifest], seen: Seen
) -> State:
    facts = _Facts(job, found, runs, newest, seen)
    nodes, restarts = facts.nodes, facts.restarts(pods)
    if found["metadata"].get("deletionTimestamp"):
        left = sum(1 for pod in newest.values() if pod["status"].get("phase") == "Running")
        if left:
            return State("running", f"told to stop; {left} of its pods still save", nodes, restarts)
        return State("stopped", "told to stop", nodes, restarts)
    if done := condition(found, "Complete") or condition(found, "Completed"):
        ended = time_of(found["status"].get("completionTime") or done.get("lastTransitionTime"))
        return State("done", "done", nodes, restarts, facts.started, ended, exit_code=0)
    cause, code = facts.what_ended_it()
    failed = condition(found, "Failed") or condition(runs, "FailureTarget")
    alone = "FailIndex" in str(runs["spec"].get("podFailurePolicy"))  # a batch: one pod's code is that pod's
    # It will be, as soon as the controller has looked.
    if failed is None and not alone and code in (WRONG_USAGE, WRONG_ENVIRONMENT):
        failed = {"reason": "PodFailurePolicy"}
    if failed:
        said = why.job_failed(condition(runs, "Failed") or failed, cause)
        return State("failed", said, nodes, restarts, facts.started, time_of(failed.get("lastTransitionTime")), code)
    return facts.alive(nodes, restarts)


@dataclass(frozen=True)
class _Facts:
    job: Job
    found: Manifest  # what was submitted
    runs: Manifest  # the Job that makes the pods
    newest: dict[int, Manifest]  # of each node
    seen: Seen

    @property
    def nodes(self) -> tuple[str, ...]:
        placed = (pod["spec"].get("nodeName") for _, pod in sorted(self.newest.items()))
        return tuple(dict.fromkeys(node for node in placed if node))

    @property
    def started(self) -> float | None:
        """When the agents that run now began: those of a restart, not those of the first start."""
        begun = [_container_time(pod, "startedAt") for pod in self.newest.values()]
        return max((t for t in begun if t is not None), default=None)

    def restarts(self, pods: list[Manifest]) -> int:
        starts: dict[int, int] = {}
        for pod in pods:
            starts[_index(pod)] = starts.get(_index(pod), 0) + 1
        return max(starts.values(), default=1) - 1

    def what_ended_it(self) -> tuple[str | None, int | None]:
        """Of the pods that failed, the one that says most: a code that means something, then node 0's."""
        ended = [
            (*why.pod_ended(pod), index)
            for index, pod in self.newest.items()
            if pod.get("status", {}).get("phase") == "Failed"
        ]
        if not ended:
            return None, None
        said, code, _ = min(
            ended, key=lambda e: (e[1] not in (WRONG_USAGE, WRONG_ENVIRONMENT), e[1] == TOLD_TO_STOP, e[2])
        )
        return said, code

    def alive(self, nodes: tuple[str, ...], restarts: int) -> State:
        asked = self.runs["spec"].get("completions") or self.job.nodes
        if self.found["spec"].get("suspend"):
            return State("waiting", self._held_back(), nodes, restarts)
        phases = {index: pod.get("status", {}).get("phase", "Pending") for index, pod in self.newest.items()}
        running = [index for index, phase in phases.items() if phase in ("Running", "Succeeded")]
        pending = [index for index, phase in phases.items() if phase == "Pending"]
        if len(running) == asked:
            return State("running", f"{_nodes(asked)} run", nodes, restarts, self.started)
        reason = self._what_is_missing(pending, phases)
        if "successPolicy" in self.runs["spec"] and 0 in running:  # elastic: the head trains with those that are there
            said = f"{len(running)} of {_nodes(asked)} run; for the others: {reason}"
            return State("running", said, nodes, restarts, self.started)
        placed = pending and all(self.newest[index]["spec"].get("nodeName") for index in pending)
        some = f"{len(running)} of {_nodes(asked)} run; " if running else ""
        return State("starting" if running or placed else "waiting", f"{some}{reason}", nodes, restarts)

    def _held_back(self) -> str:
        if names.SUSPENDED_BY_KUEUE not in self.found["metadata"]["labels"]:
            return "somebody has suspended it"
        workload = self.seen.workloads.get(self.found["metadata"]["uid"])
        return why.kueue_waits(workload)

    def _what_is_missing(self, pending: list[int], phases: dict[int, str]) -> str:
        for index in sorted(pending):
            pod = self.newest[index]
            return why.pod_waits(pod, self.seen.warnings.get(pod["metadata"]["uid"], []))
        for message in reversed(self.seen.warnings.get(self.runs["metadata"]["uid"], [])):
            if "forbidden" in message or "denied" in message or "Error creating" in message:
                return why.quota(message) or f"its pods cannot be made: {message}"
        failed = [index for index, phase in phases.items() if phase == "Failed"]
        if failed:
            said, _ = self.what_ended_it()
            return f"it is started again after a while, because of: {said}"
        if self.found is self.runs and self.found["kind"] == "JobSet":
            return "the JobSet controller has not made its job yet"
        return "the cluster has not made its pods yet"


def _newest(pods: list[Manifest]) -> dict[int, Manifest]:
    found: dict[int, Manifest] = {}
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", "")):
        found[_index(pod)] = pod
    return found


def _placed(pods: list[Manifest], last: int) -> tuple[list[Manifest], list[Manifest]]:
    """Those that are of the job, and those that have no more than its label."""
    places = [index_of(pod, names.INDEX, last) for pod in pods]
    ours = [pod for pod, place in zip(pods, places, strict=True) if place is not None]
    return ours, [pod for pod, place in zip(pods, places, strict=True) if place is None]


def _left_out(odd: list[Manifest]) -> str:
    first = odd[0]["metadata"]
    told = first["annotations"].get(names.INDEX, "")[:20]
    more = f" and {len(odd) - 1} more are" if len(odd) > 1 else " is"
    return f"pod {first['name']}{more} left out: its label is this job's, its index ({told}) is of none of its nodes"


def _index(pod: Manifest) -> int:
    return int(pod["metadata"]["annotations"].get(names.INDEX, "0"))


def _container_time(pod: Manifest, key: str) -> float | None:
    for container in pod.get("status", {}).get("containerStatuses") or ():
        for state in container.get("state", {}).values():
            if key in state:
                return time_of(state[key])
    return None


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
