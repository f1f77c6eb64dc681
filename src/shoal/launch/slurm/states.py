"""What Slurm says of many jobs, asked once: squeue for those it remembers, sacct for older ones, then our notes."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from shoal.errors import DONE, TOLD_TO_STOP, WRONG_ENVIRONMENT, WRONG_USAGE, ShoalError
from shoal.launch.backend import Phase, State
from shoal.launch.job import Job
from shoal.launch.slurm import notes
from shoal.launch.slurm.commands import Refused, ask
from shoal.launch.slurm.hostlist import expand
from shoal.launch.slurm.notes import Notes
from shoal.launch.slurm.reasons import waits_for

# squeue cuts a field at its width; the node list of a large job may be longer, and is then left out.
_FIELDS = {"JobArrayID": 40, "State": 24, "Reason": 200, "RestartCnt": 10, "NodeList": 400, "StartTime": 24}
_FIELDS |= {"EndTime": 24, "exit_code": 12}
FORMAT = ",".join(f"{name}:{width}|" for name, width in _FIELDS.items())
ACCOUNTS = "JobID,State,ExitCode,Start,End,NodeList"
MOST_ARGUMENTS = 5_000  # ids in one call; more go without, and squeue lists all jobs of this user


@dataclass(frozen=True)
class Said:
    """One job in Slurm's words, whichever command they came from."""

    id: str
    state: str
    reason: str = "None"
    restarts: int = 0
    listed: str = ""  # its nodes, folded: only those of our own jobs are ever written out
    start: float | None = None
    end: float | None = None
    code: int | None = None
    signal: int | None = None
    by: str | None = None  # who cancelled it


def of_all(jobs: Sequence[Job]) -> Mapping[str, State]:
    """Also of those that are an array: a batch."""
    tasks = {job.id: tasks_of(job) for job in jobs}
    said = states([one for job in jobs for one in tasks[job.id] or [job]])
    return {
        job.id: together([said[one.id] for one in tasks[job.id]]) if tasks[job.id] else said[job.id] for job in jobs
    }


def tasks_of(job: Job) -> list[Job]:
    """The tasks of a batch as jobs; none of any other."""
    count = job.where.get("tasks", "")
    if not count.isdecimal() or len(count) > 6 or "_" in job.id:
        return []
    return [replace(job, id=f"{job.id}_{task}", nodes=1) for task in range(int(count))]


def together(tasks: Sequence[State]) -> State:
    """Of a batch: it runs while any of its tasks does; how it ended, the first task says."""
    running = [task for task in tasks if task.phase in ("running", "starting")]
    waiting = [task for task in tasks if task.phase == "waiting"]
    first, restarts = tasks[0], max(task.restarts for task in tasks)
    nodes = tuple(dict.fromkeys(node for task in running for node in task.nodes))
    if running:
        rest = f"; {len(waiting)} wait: {waiting[0].why}" if waiting else ""
        started = min((task.started for task in running if task.started is not None), default=None)
        return State(running[0].phase, f"{len(running)} of {len(tasks)} tasks run{rest}", nodes, restarts, started)
    if waiting and first.phase not in ("done", "failed"):
        return replace(waiting[0], restarts=restarts)
    return replace(first, restarts=restarts)


def states(jobs: Sequence[Job]) -> Mapping[str, State]:
    wanted = {job.id for job in jobs}
    said = {one.id: one for one in parse_squeue(_squeue(wanted)) if one.id in wanted}
    if older := wanted - said.keys():
        said |= {one.id: one for one in parse_sacct(_sacct(older)) if one.id in older}
    return {job.id: state(job.id, said.get(job.id), _notes(job)) for job in jobs}


def _squeue(ids: set[str]) -> str:
    arrays = sorted({one.partition("_")[0] for one in ids})
    which = ["--jobs", ",".join(arrays)] if len(arrays) <= MOST_ARGUMENTS else ["--me"]
    try:
        return ask(["squeue", "--noheader", "--array", "--states=all", *which, "--Format", FORMAT], env=_plain())
    except Refused as e:  # it refuses when it knows none of them
        if "invalid job id" in str(e).lower():
            return ""
        raise _strange("squeue", e) from e


def _sacct(ids: set[str]) -> str:
    which = ["--jobs", ",".join(sorted(ids))] if len(ids) <= MOST_ARGUMENTS else ["--starttime", "now-30days"]
    try:
        return ask(["sacct", "--allocations", "--parsable2", "--noheader", *which, "--format", ACCOUNTS], env=_plain())
    except (Refused, ShoalError):  # a cluster without accounts is common, and our own notes are next
        return ""


def _plain() -> dict[str, str]:
    """Without what a person has set for their own eyes."""
    hidden = ("SQUEUE_", "SACCT_", "SLURM_TIME_FORMAT")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}


def _notes(job: Job) -> Notes | None:
    return notes.read(notes.file_of(Path(job.workspace), job.id))


def _strange(command: str, e: Refused) -> ShoalError:
    return ShoalError(f"`{command}` said something unexpected ({str(e).splitlines()[-1:]}); try it by hand.")


def parse_squeue(text: str) -> Iterable[Said]:
    for line in text.splitlines():
        fields = [part.strip() for part in line.split("|")]
        if len(fields) < len(_FIELDS):
            continue
        id_, state, reason, restarts, nodes, start, end, code = fields[: len(_FIELDS)]
        whole = len(nodes) < _FIELDS["NodeList"]
        left, signal = _exit(code)
        yield Said(
            id_, state, reason or "None", int(restarts) if restarts.isdecimal() and len(restarts) < 10 else 0,
            nodes if whole else "", _time(start), _time(end), left, signal,
        )  # fmt: skip


def parse_sacct(text: str) -> Iterable[Said]:
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != ACCOUNTS.count(",") + 1:
            continue
        id_, state, code, start, end, nodes = fields
        state, _, by = state.partition(" by ")
        left, signal = _exit(code)
        listed = "" if nodes == "None assigned" else nodes
        yield Said(
            id_, state, listed=listed, start=_time(start), end=_time(end), code=left, signal=signal, by=_user(by)
        )


def _exit(text: str) -> tuple[int | None, int | None]:
    """`2:0` (exit code and signal), or the wait status that older squeues print: 512 is code 2, 15 is SIGTERM."""
    if found := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text):
        return int(found[1]), int(found[2]) or None
    if text.isdecimal() and len(text) < 10:
        return int(text) >> 8 & 255, int(text) & 127 or None
    return None, None


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):  # N/A, Unknown, None, the year 1
        return None


def _user(number: str) -> str | None:
    try:
        return pwd.getpwuid(int(number)).pw_name if number else None
    except (KeyError, ValueError, OverflowError):
        return number


def state(job: str, said: Said | None, noted: Notes | None) -> State:
    if said is None:
        return _forgotten(job, noted)
    nodes = expand(said.listed)
    phase, why = _words(said, nodes, noted)
    over = phase in ("done", "failed", "stopped")
    return State(
        phase, why, nodes, said.restarts,
        started=None if phase == "waiting" else said.start,
        ended=said.end if over else None,
        exit_code=said.code if over and (said.code or said.signal is None) else None,
    )  # fmt: skip


def _words(said: Said, nodes: tuple[str, ...], noted: Notes | None) -> tuple[Phase, str]:
    match said.state:
        case "PENDING" | "REQUEUED" | "REQUEUE_FED":
            return "waiting", _waits(said, noted)
        case "REQUEUE_HOLD" | "SPECIAL_EXIT":
            return "waiting", waits_for("JobHeldUser", said.id, None)
        case "SUSPENDED" | "STOPPED":
            return "waiting", "Slurm has suspended it to make room; it goes on when that is over"
        case "CONFIGURING":
            return "starting", "its nodes are being started"
        case "RUNNING" | "RESIZING" | "SIGNALING":
            return "running", f"on {_some(nodes)}"
        case "COMPLETING" | "STAGE_OUT":
            return "running", "its processes are ending"
        case "COMPLETED":
            return "done", "all steps are done"
        case "FAILED" if said.code == TOLD_TO_STOP:
            return "stopped", "it was told to stop and has saved; launch it again to go on"
        case "FAILED":
            return "failed", _failed(said, noted)
        case "CANCELLED":
            return "stopped", f"cancelled by {said.by}" if said.by else "it was cancelled"
    return ("failed", _ENDS[said.state].format(nodes=_some(nodes))) if said.state in _ENDS else (
        "unknown", f"Slurm calls its state {said.state}; `scontrol show job {said.id}` tells more"
    )  # fmt: skip


_ENDS = {
    "TIMEOUT": "its time limit was reached before it could be requeued; launch it again, it goes on from its newest "
    "checkpoint",
    "OUT_OF_MEMORY": "a node ran out of the memory that was asked for; raise launch.memory_gb and launch it again",
    "NODE_FAIL": "a node was lost ({nodes}) and the cluster does not requeue jobs; launch it again",
    "PREEMPTED": "it had to make room and the cluster does not requeue such jobs; launch it again",
    "BOOT_FAIL": "a node could not be started; launch it again",
    "DEADLINE": "it could not end before its deadline; launch it with less to do or none",
    "LAUNCH_FAILED": "Slurm could not start it on {nodes}; `sinfo -R` says which node is bad",
    "RECONFIG_FAIL": "a node could not be made ready; launch it again",
    "REVOKED": "another cluster of the federation has taken it",
}


def _waits(said: Said, noted: Notes | None) -> str:
    start = None if said.start is None else f"{datetime.fromtimestamp(said.start):%Y-%m-%d %H:%M:%S}"
    why = waits_for(said.reason, said.id, start)
    if not said.restarts:
        return why
    before = noted.why if noted and noted.why else "Slurm ended the last start (preemption or a lost node)"
    return f"{why}; it is to be started again: {before}"


def _failed(said: Said, noted: Notes | None) -> str:
    if noted and noted.over and noted.why:
        return noted.why
    if said.signal:
        return f"its batch script was killed by signal {said.signal}; see its log"
    known = {WRONG_USAGE: "the run file is wrong", WRONG_ENVIRONMENT: "its data or environment is wrong"}
    how = known.get(said.code or 0, "it failed")
    return (
        f"{how} (code {said.code}); see its log"
        if said.code
        else f"Slurm could not start it ({said.reason}); see its log"
    )


def _forgotten(job: str, noted: Notes | None) -> State:
    if noted is None or not noted.over:
        last = f"; its last words were: {noted.why}" if noted and noted.why else ""
        return State("gone", f"Slurm does not know job {job} any more and keeps no accounts{last}")
    phase: Phase = {DONE: "done", TOLD_TO_STOP: "stopped"}.get(noted.code or 0, "failed")  # type: ignore[assignment]
    return State(phase, noted.why, ended=noted.time, exit_code=noted.code)


def _some(nodes: tuple[str, ...]) -> str:
    if not nodes:
        return "its nodes"
    return ", ".join(nodes) if len(nodes) <= 4 else f"{nodes[0]}, {nodes[1]} and {len(nodes) - 2} more nodes"
