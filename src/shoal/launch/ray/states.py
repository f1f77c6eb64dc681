"""What Ray says of a job, in our words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.errors import TOLD_TO_STOP
from shoal.launch.backend import Phase, State
from shoal.launch.job import Job
from shoal.launch.ray.places import GANG
from shoal.values import LAST_YEAR, BadValue, real

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

LONGEST = 300
_SAID = re.compile(r"^(?:\[\d+\] )?shoal: (.+?)\.?$", re.MULTILINE)
_NO_SUCH_PYTHON = (126, 127)  # the shell's


def states(jobs: list[Job], found: Mapping[str, JobDetails], groups: Mapping[str, str]) -> dict[str, State]:
    """`found` by submission ids; `groups` are the states of placement groups by their names."""
    return {job.id: _state(job, found.get(job.id), groups.get(GANG.format(job=job.id))) for job in jobs}


def _state(job: Job, said: JobDetails | None, group: str | None) -> State:
    if said is None:
        return State("gone", f"the Ray cluster knows nothing of job {job.id}; its head was started anew since")
    phase, why = _words(job, said, group)
    return State(
        phase,
        why,
        started=_seconds(said.start_time),
        ended=_seconds(said.end_time),
        exit_code=said.driver_exit_code,
    )


def _seconds(ms: object) -> float | None:
    """None where it is no time: what Ray's client hands on is as the server said it."""
    try:
        return real(ms, 1000 * LAST_YEAR, 0) / 1000
    except BadValue:
        return None


def _words(job: Job, said: JobDetails, group: str | None) -> tuple[Phase, str]:
    match str(said.status.value):
        case "PENDING":
            return "waiting", "Ray starts its driver"
        case "RUNNING" if group in ("PENDING", "PREPARED"):
            each = f" with {job.gpus} GPUs each" if job.gpus else ""
            return "waiting", f"the Ray cluster does not have {job.nodes} free nodes{each}"
        case "RUNNING" if group == "RESCHEDULING":
            return "running", "it has lost a machine, and the Ray cluster has no other for it yet"
        case "RUNNING":
            return "running", "its driver runs on the Ray cluster"
        case "SUCCEEDED":
            return "done", "all steps are done"
        case "STOPPED":
            return "stopped", "it was told to stop"
    if said.driver_exit_code == TOLD_TO_STOP:
        return "stopped", "its driver was told to stop"
    return "failed", _reason(said)


def _reason(said: JobDetails) -> str:
    """The last of our own sentences in the log that Ray sends along; else Ray's."""
    code, message = said.driver_exit_code, said.message or ""
    if code in _NO_SUCH_PYTHON:
        program = next(iter((said.entrypoint or "").removeprefix("exec ").split()), "its program")
        return f"{program} cannot be run on Ray's head; set launch.python to the Python there that has Shoal"
    sentences = _SAID.findall(message)
    if code is None:
        return _short(message) or "Ray does not say why"
    return f"exit code {code}: {_short(sentences[-1] if sentences else _last_line(message))}"


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"


def _short(text: str) -> str:
    plain = " ".join(text.split()).rstrip(".")
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"
