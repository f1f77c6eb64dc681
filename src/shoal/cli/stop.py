"""Stop a run; its state is saved first.

A launched run is stopped by its scheduler. `shoal resume NAME` goes on from there. `--now` ends the workers at once,
without saving.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

from shoal.cli.options import add_workspace
from shoal.decide.load import load
from shoal.errors import SetupError, TransientError
from shoal.guard.history import History
from shoal.guard.orphans import agents_of
from shoal.journal import lock
from shoal.journal.rundir import RunDir, find_run, workspace
from shoal.journal.suggested import going_on
from shoal.launch.backend import OVER, backend_of
from shoal.launch.following import ASK_EVERY_S
from shoal.launch.job import Job, launched, on, remember, run_file
from shoal.launch.send import state_of
from shoal.launch.watch import visible
from shoal.spec.run import Guard

LOOK_EVERY_S = 0.1
MARGIN_S = 30.0  # on top of the run's own grace: killing, the last records, the tracking mirror
SCHEDULER_MARGIN_S = 90.0  # a scheduler looks after its jobs every half minute or so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="NAME", help="the run's name (`shoal ps` lists them)")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to wait (default: guard.grace_s and 30 more)"
    )
    parser.add_argument("--now", action="store_true", help="end the workers at once, without saving")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    folder = workspace(args.workspace)
    job = launched(args.run, folder)
    if job is not None and (over := _stop_job(job, folder, args)) is not None:
        return over
    run_dir = find_run(args.run, folder)
    by = lock.holder(run_dir)
    if by is None:
        print(f"run {run_dir.name} is not running: {_state(run_dir)}.")
        return 0
    if by.host != socket.gethostname():
        raise SetupError(f"run '{run_dir.name}' runs on {by.host} as pid {by.pid}; stop it there.")
    timeout_s = args.timeout if args.timeout is not None else load(run_dir.spec_file).run.guard.grace_s + MARGIN_S
    for pid in [by.pid, *agents_of(run_dir)]:  # the supervisor may be dead, and its islands alive
        _signal(pid, signal.SIGTERM)
        if args.now:
            _signal(pid, signal.SIGINT)  # a Ctrl-C after any stop means: at once
    deadline = time.monotonic() + timeout_s
    while lock.holder(run_dir) == by:
        if time.monotonic() > deadline:
            raise TransientError(
                f"run '{run_dir.name}' (pid {by.pid}) was told to stop and is still at it after {timeout_s:g} s; "
                f"wait, or `shoal stop {run_dir.name} --now` ends it without saving."
            )
        time.sleep(LOOK_EVERY_S)
    print(f"run {run_dir.name}: {_state(run_dir)}.")
    return 0


def _stop_job(job: Job, folder: Path, args: argparse.Namespace) -> int | None:
    """Through its scheduler. None where the job is over and somebody may have gone on with the run by hand."""
    of, run_dir = backend_of(job), visible(job, folder)
    before = of.states([job]).get(job.id)
    if before is None or before.phase in OVER:
        if run_dir.exists():
            return None
        print(f"run {job.run} is not running: {'gone' if before is None else before.why}.")
        return 0
    of.stop(job, args.now)
    job = replace(job, stopped=time.time())
    remember(job, RunDir.of(job.run, folder))
    file = run_file(job, folder)
    grace_s = load(file).run.guard.grace_s if file.exists() else Guard().grace_s
    timeout_s = args.timeout if args.timeout is not None else grace_s + SCHEDULER_MARGIN_S
    deadline = time.monotonic() + timeout_s
    while (said := state_of(job, of)).phase not in OVER:
        if time.monotonic() > deadline:
            raise TransientError(
                f"run '{job.run}' was told to stop, and {on(job)} says after {timeout_s:g} s: {said.phase}, "
                f"{said.why}; wait, or `shoal stop {job.run} --now` ends it without saving."
            )
        time.sleep(ASK_EVERY_S.get(job.backend, LOOK_EVERY_S * 10))
    print(f"run {job.run}: {_state(run_dir) if run_dir.exists() else said.why}.")
    return 0


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has just ended by itself
    except PermissionError:
        raise SetupError(f"pid {pid} belongs to another user; only they or root can stop it.") from None


def _state(run_dir: RunDir) -> str:
    if run_dir.is_batch:
        from shoal.observe.status import status_of

        return status_of(run_dir).why
    history = History.of(run_dir)
    close = history.last_close
    if history.open or close is None:
        return f"its supervisor died at step {history.at}; {going_on(run_dir, None)}"
    if close["status"] == "done":
        return f"done at step {history.at}"
    how = f"{close['status']} at step {history.at} ({close['reason']})"
    return f"{how}; {going_on(run_dir, close['exit_code'])}"
