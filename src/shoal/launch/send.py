"""From a run to a job: what must hold, what travels, and who may not be sent twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.decide.batch import startable
from shoal.decide.checks import local_inputs, trainable
from shoal.decide.length import with_steps
from shoal.errors import SetupError, ShoalError, SpecError, UsageError
from shoal.guard.begin import writing
from shoal.journal import lock
from shoal.journal.rundir import RunDir
from shoal.journal.suggested import command
from shoal.journal.units import read_lines
from shoal.launch.backend import OVER, Backend, State, backend_of, remembering
from shoal.launch.bundle import Bundle
from shoal.launch.job import RUN_FILE, Job, on, remember, remembered
from shoal.launch.request import Request, check
from shoal.own.carry import carried
from shoal.script.file import look_at
from shoal.spec import Run, dump
from shoal.spec.batch import Batch
from shoal.spec.drivers import driver_of
from shoal.spec.script import Script


def checked(run: Run, begun: bool = False) -> Run:
    """All that can be found wrong here, before anything is sent. The data only where the nodes see the same disk."""
    check(run)
    trainable(run, driver_of(run))
    if run.batch is not None:
        batch_travels(run, run.batch)
    elif run.script is not None:
        travels(run, run.script)
    elif same_paths(run):
        local_inputs(run, begun)
    return run


def travels(run: Run, script: Script) -> None:
    """Refuses a script that the node would not have: it sees this disk, or launch.code brings it."""
    look_at(Path(script.path))
    code = run.launch.code
    if not same_paths(run) and (code is None or not Path(script.path).is_relative_to(code)):
        raise SpecError(
            f"script.path {script.path} is on this machine, and the node may not see it; name a folder that holds it "
            "in launch.code, which travels."
        )


def batch_travels(run: Run, batch: Batch) -> None:
    """Refuses items and a program that the nodes would not have, and items that are none."""
    if isinstance(batch.items, str):
        read_lines(Path(batch.items))
    if same_paths(run):
        startable(batch, batch.folder or os.getcwd())
        return
    code = run.launch.code
    if isinstance(batch.items, str) and (code is None or not Path(batch.items).is_relative_to(code)):
        raise SpecError(
            f"batch.items {batch.items} is on this machine, and the nodes may not see it; put it into a folder that is "
            "named in launch.code, which travels."
        )


def same_paths(run: Run) -> bool:
    """Whether a path of this machine means the same on the nodes."""
    launch = run.launch
    here = launch.on in ("local", "slurm") or (launch.on == "ray" and launch.ray.address == "auto")
    return here and run.own.launcher is None and launch.workspace is None and launch.image is None


def where_known(run: Run, workspace: Path, begun: int = 0) -> Run:
    """The run with its steps, where its epochs can be counted here; elsewhere node 0 counts them. A script with the
    folder that it was started from, where the node has that."""
    if run.batch is not None:
        if run.batch.folder is not None or not same_paths(run):
            return run
        return run.model_copy(update={"batch": run.batch.model_copy(update={"folder": os.getcwd()})})
    if run.script is not None:
        known = run.script.folder is not None or not same_paths(run)
        return (
            run if known else run.model_copy(update={"script": run.script.model_copy(update={"folder": os.getcwd()})})
        )
    if run.train.epochs is not None and not same_paths(run):
        return run
    return with_steps(run, workspace, begun)


def request_of(run: Run, workspace: Path) -> Request:
    code = None if run.launch.code is None else Path(run.launch.code)
    return Request(run, workspace, Bundle.of(dump(run), code, carried(run, RunDir.of(run.name, workspace))))


def send(request: Request) -> Job:
    """Submits it and remembers the job."""
    job = backend_of(request.run).submit(request)
    remember_sent(job, request)
    return job


def remember_sent(job: Job, request: Request) -> None:
    run_dir = RunDir.of(request.name, request.workspace)
    with writing(run_dir):
        remember(job, run_dir)
        (run_dir.path / RUN_FILE).write_text(request.bundle.files[Bundle.RUN_FILE].decode())


@contextmanager
def alone(run_dir: RunDir) -> Iterator[None]:
    """Between the look whether a run is alive and the moment its job is remembered nobody else may send it."""
    with writing(run_dir):
        run_dir.path.mkdir(parents=True, exist_ok=True)
    fd = os.open(run_dir.path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        refuse_if_alive(run_dir)
        yield
    finally:
        os.close(fd)
        _remove_if_empty(run_dir)


def refuse_if_alive(run_dir: RunDir) -> None:
    follow, stop = command("logs -f", run_dir), command("stop", run_dir)
    if by := lock.holder(run_dir):
        raise UsageError(
            f"run '{run_dir.name}' is running as pid {by.pid} on {by.host}; {follow} follows it, {stop} ends it."
        )
    job = remembered(run_dir)
    if job is None:
        return
    said = state_of(job, backend_of(job))
    if said.phase == "unknown":
        raise SetupError(
            f"run '{run_dir.name}' was launched before ({on(job)}), and nobody can say whether it is over: {said.why}; "
            "mend that, or give this one another --name."
        )
    if said.phase not in OVER:
        raise UsageError(
            f"run '{run_dir.name}' is {said.phase} on {on(job)} ({said.why}); {follow} follows it, {stop} ends it."
        )


def state_of(job: Job, of: Backend) -> State:
    """What its scheduler says; one that cannot be asked says so."""
    try:
        said = of.states([job])
    except ShoalError as e:
        return State("unknown", str(e).rstrip("."))
    return remembering(job, said.get(job.id, State("gone", f"{job.backend} knows nothing of job {job.id} any more")))


def _remove_if_empty(run_dir: RunDir) -> None:
    """What was refused leaves no trace."""
    try:
        run_dir.path.rmdir()
    except OSError:
        return
