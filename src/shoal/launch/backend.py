"""What every scheduler must be able to do for Shoal: five functions, and the words they answer in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from shoal.launch.job import Job

if TYPE_CHECKING:
    from shoal.launch.request import Request
    from shoal.spec.run import Run

Phase = Literal["waiting", "starting", "running", "done", "failed", "stopped", "gone", "unknown"]
OVER: tuple[Phase, ...] = ("done", "failed", "stopped", "gone")


@dataclass(frozen=True)
class Rendered:
    """One thing that is sent: a batch script, a manifest, a program's arguments."""

    name: str  # as a file would be called: `job.sbatch`, `job.yaml`
    text: str


@dataclass(frozen=True)
class State:
    """What a scheduler says of a job, in our words."""

    phase: Phase
    why: str  # one plain sentence without its full stop: what it waits for, what ended it
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    started: float | None = None  # unix time of this start
    ended: float | None = None
    exit_code: int | None = None


class Backend(Protocol):
    name: str

    def render(self, request: Request) -> list[Rendered]:
        """Exactly what `submit` would send, but for the values of secrets. Never talks to the scheduler."""
        ...

    def submit(self, request: Request) -> Job:
        """Sends it. What is wrong with the request or the scheduler is one sentence (UsageError, SetupError)."""
        ...

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        """Of all these jobs, by their ids, in a number of calls that does not grow with theirs."""
        ...

    def logs(self, job: Job, follow: bool, lines: int | None) -> Iterator[str]:
        """What the agents of the job have printed, merged, each line with its node; for a job whose run directory
        cannot be seen from here, or that has not come to write one."""
        ...

    def stop(self, job: Job, now: bool) -> None:
        """Tells it to save and end (`now`: without saving). Returns once the scheduler has taken the order."""
        ...


def backend_of(of: Job | Run) -> Backend:
    """Whoever has a job, or is to get a run."""
    if isinstance(of, Job):
        return backend(of.backend, of.where.get("own.folder", ""))
    return backend(of.own.launcher or of.launch.on, of.own.folder or os.getcwd())


def backend(name: str, folder: str = "") -> Backend:
    """The one of that name; what it needs is imported only here. `folder`: of a launcher of somebody's own."""
    if ":" in name:
        from shoal.launch.own import launcher

        return launcher(name, folder)
    match name:
        case "local":
            from shoal.launch.local import Local

            return Local()
        case "slurm":
            from shoal.launch.slurm.backend import Slurm

            return Slurm()
        case "kubernetes":
            from shoal.launch.kubernetes.backend import Kubernetes

            return Kubernetes()
        case "ray":
            from shoal.launch.ray.backend import Ray

            return Ray()
    raise ValueError(name)


def remembering(job: Job, state: State) -> State:
    """A job that is gone because a person stopped it was stopped."""
    return State("stopped", "it was told to stop") if state.phase == "gone" and job.stopped else state
