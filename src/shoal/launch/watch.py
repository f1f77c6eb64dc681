"""All launched runs of a workspace at one look: one question a scheduler, and the journals that can be seen from here.

The scheduler knows why a job waits and that it is gone; the journal knows what a run does and why it died. Each is
asked for what it knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.journal.rundir import RunDir
from shoal.launch.backend import OVER, State, backend_of, remembering
from shoal.launch.job import FILE, Job, on, remembered
from shoal.observe.status import Status, status_of
from shoal.values import BadValue

NAMES = {"done": "finished", "gone": "dead"}  # of phases, in the words of `shoal ps`
ENDS = ("finished", "stopped", "failed")  # that a journal tells of


@dataclass(frozen=True)
class Seen:
    """A launched run: what its scheduler and its journal say, and both together."""

    job: Job
    state: State
    status: Status

    @property
    def on(self) -> str:
        return on(self.job)

    @property
    def over(self) -> bool:
        return self.state.phase in OVER

    def as_json(self) -> dict[str, Any]:
        job, state = self.job, self.state
        about = {"on": job.backend, "job": job.id, "phase": state.phase, "scheduler": state.why}
        more = {"nodes": list(state.nodes), "restarts": state.restarts, "exit_code": state.exit_code}
        return {**self.status.as_json(), **about, **more}


def jobs_in(workspace: Path) -> tuple[dict[str, Job], dict[str, str]]:
    """Every launched run, by its name, and what is wrong with those that cannot be read."""
    found, wrong = {}, {}
    for path in sorted((workspace / "runs").glob(f"*/{FILE}")):
        try:
            job = remembered(RunDir(path.parent))
        except ShoalError as e:
            wrong[path.parent.name] = str(e)
            continue
        if job is not None:
            found[path.parent.name] = job
    return found, wrong


def look(jobs: Iterable[Job], workspace: Path) -> dict[str, Seen]:
    """By the runs' names. A scheduler that cannot be reached does not hide the others."""
    now, jobs = time.time(), list(jobs)
    said = states(jobs)
    return {job.run: _seen(job, said[job.run], workspace, now) for job in jobs}


def states(jobs: Iterable[Job]) -> dict[str, State]:
    """What the schedulers say, by the runs' names, each asked once for all of its jobs, and all at the same time: one
    that is away takes long to say so."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.backend, tuple(sorted(job.where.items()))), []).append(job)
    with ThreadPoolExecutor(max_workers=max(1, len(groups))) as pool:
        asked = [pool.submit(_states_of, name, of_it) for (name, _), of_it in groups.items()]
        return {run: state for one in asked for run, state in one.result().items()}


def _states_of(name: str, jobs: list[Job]) -> dict[str, State]:
    try:
        said = backend_of(jobs[0]).states(jobs)
    except ShoalError as e:
        away = State("unknown", f"{name} cannot be asked: {str(e).rstrip('.')}")
        return {job.run: away for job in jobs}
    gone = State("gone", f"{name} knows nothing of it any more")
    return {job.run: remembering(job, said.get(job.id, gone)) for job in jobs}


def visible(job: Job, workspace: Path) -> RunDir:
    """The run's directory, where it can be seen from here: under the path that the nodes use, or in this workspace."""
    there = RunDir.of(job.run, Path(job.workspace))
    return there if there.exists() else RunDir.of(job.run, workspace)


def _seen(job: Job, state: State, workspace: Path, now: float) -> Seen:
    run_dir, told = visible(job, workspace), None
    if run_dir.exists():
        with suppress(
            ShoalError, OSError, BadValue
        ):  # a journal that cannot be read: the scheduler still says something
            told = status_of(run_dir, now, alive=state.phase == "running")
    return Seen(job, state, merged(job, state, told))


def merged(job: Job, state: State, told: Status | None) -> Status:
    """One word and one sentence, of whoever knows better."""
    if told is None:
        blank = Status(job.run, "unknown", 0, None, None, None, job.submitted, job.submitted, "")
        return replace(blank, status=NAMES.get(state.phase, state.phase), why=state.why)
    ours = told.updated >= job.submitted  # else it is of an earlier start of the run
    match state.phase:
        case "waiting" | "starting":
            best = False
        case "running":
            best = ours and told.status in ("running", "finished")
            state = state if best else replace(state, phase="starting")
        case "unknown":
            best = told.status in ("running", "finished")
        case _:
            best = told.status == "running" or (ours and told.status in ENDS)
    return told if best else replace(told, status=NAMES.get(state.phase, state.phase), why=state.why)
