"""Upload what a tracker has not received yet.

shoal track sync demo
shoal track sync --all
"""

from __future__ import annotations

import argparse

from shoal.cli.options import add_workspace
from shoal.errors import DONE, TRANSIENT, ShoalError, UsageError
from shoal.journal.rundir import RunDir, find_run, runs_in, workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="sync", required=True)
    sync = verbs.add_parser("sync", help="upload the rest of a run's journal to its trackers")
    sync.add_argument("run", metavar="RUN", nargs="?", help="name of a run, or the path of its directory")
    sync.add_argument("--all", action="store_true", help="every run of the workspace")
    add_workspace(sync)


def run(args: argparse.Namespace) -> int:
    folder = workspace(args.workspace)
    if bool(args.run) == args.all:
        raise UsageError("name one run, or say --all: `shoal track sync RUN`.")
    runs = runs_in(folder) if args.all else [find_run(args.run, folder)]
    behind = [run_dir.name for run_dir in runs if not _sync(run_dir)]
    return TRANSIENT if behind else DONE


def _sync(run_dir: RunDir) -> bool:
    from shoal.track.mirror import Mirror

    try:
        mirror = Mirror(run_dir, until_closed=False, say=lambda text: None)
    except ShoalError as e:  # the other runs of --all are not to blame
        print(f"{run_dir.name}: {e}")
        return False
    if not mirror.pumps:
        print(f"{run_dir.name}: no tracker is switched on")
    for pump in mirror.sync():
        what = "everything is uploaded" if pump.complete else f"{pump.behind_bytes:,} bytes are left: {pump.failing}"
        print(f"{run_dir.name}: {pump.label}: {what}")
    return all(pump.complete for pump in mirror.pumps)
