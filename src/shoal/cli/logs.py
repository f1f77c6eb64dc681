"""Print the logs of a run's processes, merged, each line with its rank; -f follows them and the run's progress.
Of a launched run whose directory cannot be seen from here: what its agents print, each line with its node.

shoal logs demo -n 50
shoal logs demo -f --rank 1
shoal logs clean --unit 17        of a batch: what this unit printed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace
from shoal.errors import UsageError
from shoal.journal.rundir import RunDir, find_run, workspace

if TYPE_CHECKING:
    from shoal.launch.job import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, or the path of its directory")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines and steps come, until the run ends")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N lines (with -f: 20 unless told)")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument("--island", type=int, metavar="N", help="only this island (lines begin with ISLAND.RANK)")
    parser.add_argument("--unit", type=int, metavar="N", help="only this unit of a batch (its newest attempt)")
    parser.add_argument("--attempt", type=int, metavar="N", help="this attempt; default: the newest")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.launch.job import launched
    from shoal.observe.logs import follow, merged

    folder = workspace(args.workspace)
    if (batch := _batch_of(args.run, folder)) is not None:
        return _of_batch(batch, args)
    if args.unit is not None:
        raise UsageError(
            f"run '{args.run}' is no batch that can be seen from here, so it has no units; leave --unit out."
        )
    if job := launched(args.run, folder):
        from shoal.launch.following import lines as of_job  # and with it the run file's types: others need not wait

        return _show(
            of_job(job, folder, args.follow, args.lines, _say, args.rank, args.attempt, args.island), args.follow
        )
    run_dir = find_run(args.run, folder)
    if args.follow:
        lines = follow(run_dir, args.rank, args.attempt, 20 if args.lines is None else args.lines, args.island)
    else:
        lines = merged(run_dir, args.rank, args.attempt, args.lines, args.island)
    return _show(lines, args.follow)


def _batch_of(name: str, folder: Path) -> RunDir | None:
    """A batch whose directory can be seen from here: it has the units' own logs."""
    from shoal.launch.job import launched

    run_dir = RunDir.of(name, folder)
    if job := launched(name, folder):
        there = RunDir.of(job.run, Path(job.workspace))
        run_dir = there if there.exists() else run_dir
    elif not run_dir.exists():
        run_dir = find_run(name, folder)
    return run_dir if run_dir.exists() and run_dir.is_batch else None


def _of_batch(run_dir: RunDir, args: argparse.Namespace) -> int:
    from shoal.observe.unit_logs import follow, lines

    for option in ("rank", "island"):
        if getattr(args, option) is not None:
            raise UsageError(f"run '{run_dir.name}' is a batch: it has units and no {option}s; give --unit N.")
    if args.follow:
        return _show(follow(run_dir, args.unit, args.attempt, 20 if args.lines is None else args.lines), True)
    return _show(lines(run_dir, args.unit, args.attempt, args.lines), False)


def follow_job(job: Job, run_dir: RunDir) -> int:
    """What `shoal launch --follow` does next: it leaves as the run does."""
    from shoal.errors import DONE, TRANSIENT
    from shoal.launch.backend import backend_of
    from shoal.launch.following import lines
    from shoal.launch.send import state_of

    _show(lines(job, run_dir.workspace, True, None, _say), flush=True)
    said = state_of(job, backend_of(job))
    return DONE if said.phase == "done" else said.exit_code or TRANSIENT


def _show(lines: Iterable[str], flush: bool) -> int:
    shown = 0
    for shown, line in enumerate(lines, 1):  # noqa: B007  # how many there were is asked below
        sys.stdout.write(line + "\n")
        if flush:
            sys.stdout.flush()
    if not shown:
        print(
            "shoal: the processes of this attempt printed nothing; `shoal logs -f` tells how the run goes, "
            "--attempt N shows another attempt.",
            file=sys.stderr,
        )
    return 0


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
