"""Stop a run; its state is saved first.

`shoal resume NAME` goes on from there. `--now` ends the workers at once, without saving.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time

from shoal.errors import SetupError, TransientError
from shoal.guard import lock
from shoal.guard.history import History
from shoal.guard.orphans import agents_of
from shoal.observe.commands import going_on
from shoal.spec import load
from shoal.track.rundir import RunDir, find_run, workspace

LOOK_EVERY_S = 0.1
MARGIN_S = 30.0  # on top of the run's own grace: killing, the last records, the tracking mirror


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="NAME", help="the run's name (`shoal ps` lists them)")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to wait (default: guard.grace_s and 30 more)"
    )
    parser.add_argument("--now", action="store_true", help="end the workers at once, without saving")
    parser.add_argument(
        "--workspace", metavar="DIR", help="the folder that holds runs/ (default: $SHOAL_WORKSPACE or here)"
    )


def run(args: argparse.Namespace) -> int:
    run_dir = find_run(args.run, workspace(args.workspace))
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


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has just ended by itself
    except PermissionError:
        raise SetupError(f"pid {pid} belongs to another user; only they or root can stop it.") from None


def _state(run_dir: RunDir) -> str:
    history = History.of(run_dir)
    close = history.last_close
    if history.open or close is None:
        return f"its supervisor died at step {history.step}; {going_on(run_dir, None)}"
    if close["status"] == "done":
        return f"done at step {history.step}"
    how = f"{close['status']} at step {history.step} ({close['reason']})"
    return f"{how}; {going_on(run_dir, close['exit_code'])}"
